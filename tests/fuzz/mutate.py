"""Damage to a file: bytes that changed, values of a document that nobody would write, text around them.

Every function takes its own random numbers and gives the same damage for the same seed.
"""

import json
import re

# Texts that stand for one value in JSON, or in TOML where they are allowed there.
NASTY = [
    *("null", "true", "false", "0", "-1", "1", "3", "1.9", "-0.0", "0.5", "1e308", "-1e308", "1e400", "NaN"),
    *("Infinity", "-Infinity", "2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 30),
    *("9" * 5000, "1e-320", '""', '"a"', '"\\u0000"', '"\\u001b[2J\\u001b[31m"', '"\\ud800"', '"\\u202e"'),
    *('"' + "x" * 10_000 + '"', '"nan"', '"../../../etc/passwd"', '"/dev/zero"', '"1"', '"%s%n{0}"'),
    *("[]", "{}", "[[]]", '{"a": {}}', "[1, 2, 3]", "[" * 3000 + "]" * 3000),
    '{"a":' * 2000 + "1" + "}" * 2000,
]  # fmt: skip
_INSERTED = (b"\0", b"\xff", b"\x1b[31m", b"\r", b"\n", b'"', b"{", b"\xed\xa0\x80", b"\xe2\x80\xae")
# NaN, infinity and large numbers
_ELEMENTS = (
    b"\x00\x00\xc0\x7f",
    b"\x00\x00\x80\x7f",
    b"\xff\xff\x7f\x7f",
    b"\xca\xf2\x49\x71",
)
_WORDS = (b"\x1b]0;title\x07", b"\0", b"\xff\xfe", b"x" * 100_000, "\u202eabc".encode(), b"")
_MARK = "@@{}@@"


def damaged(content, kind, random):
    """The content of a file of this kind, with one to three faults in it."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        wild = random.random() < 0.3
        content = _bytes(content, random) if wild else KINDS[kind](content, random)
    return content


def _bytes(content, random):
    """Flipped, lost, repeated or inserted bytes."""
    if not content:
        return random.randbytes(random.randrange(1, 40))
    at, length = random.randrange(len(content)), random.choice((1, 1, 2, 8, 64, 1000))
    rest = content[at + length :]
    choice = random.randrange(6)
    if choice == 0:
        return content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :]
    if choice == 1:
        return content[:at]
    if choice == 2:
        return content[:at] + rest
    if choice == 3:
        return content[:at] + content[at : at + length] * random.choice((2, 3, 100)) + rest
    if choice == 4:
        return content[:at] + random.randbytes(length) + rest
    inserted = random.choice(
        (b"\0", b"\xff", b"\x1b[31m", b"\r", b"\n", b'"', b"{", b"\xed\xa0\x80", b"\xe2\x80\xae")
    )
    return content[:at] + inserted + content[at:]


def _json(content, random):
    """One value of the document replaced, removed, doubled or renamed."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return _bytes(content, random)
    places = list(_places(document))
    if not places:
        return random.choice(NASTY).encode()
    holder, key = random.choice(places)
    choice = random.randrange(8)
    raw = random.choice(NASTY)
    if choice < 5:
        holder[key] = _MARK.format(0)
    elif choice == 5:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        name = random.choice(("", "\0", "\x1b[1m", "x" * 1000, key + " ", "\ud800"))
        holder[name] = holder.pop(key)
    text = json.dumps(document, indent=random.choice((None, 1)))
    return text.replace(f'"{_MARK.format(0)}"', raw).encode()


def _places(document):
    """(holder, key) of every value inside a document."""
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        inside = (
            holder.items()
            if isinstance(holder, dict)
            else enumerate(holder)
            if isinstance(holder, list)
            else ()
        )
        for key, value in list(inside):
            yield holder, key
            waiting.append(value)


def _jsonl(content, random):
    lines = content.splitlines(keepends=True)
    if not lines:
        return _bytes(content, random)
    at = random.randrange(len(lines))
    choice = random.randrange(6)
    if choice == 0:
        lines.insert(at, lines[random.randrange(len(lines))])
    elif choice == 1:
        lines[at] = lines[at].rstrip(b"\n")
    else:
        lines[at] = _json(lines[at], random) + b"\n"
    return b"".join(lines)


def _toml(content, random):
    """One value of a line replaced, one line lost, doubled or made up."""
    lines = content.decode(errors="replace").splitlines(keepends=True)
    values = [i for i, line in enumerate(lines) if "=" in line]
    if not values:
        return _bytes(content, random)
    at, raw = random.choice(values), random.choice(NASTY)
    key = lines[at].partition("=")[0]
    choice = random.randrange(8)
    if choice < 5:
        lines[at] = f"{key}= {raw.lower() if raw in ('NaN',) else raw}\n"
    elif choice == 5:
        del lines[at]
    elif choice == 6:
        lines.insert(at, lines[at])
    else:
        name = random.choice(
            ('"\\u001b[31m"', "a.b.c", "a." * 1000 + "b", "a." * 50_000 + "b", '""', "[x]", "[" * 3000)
        )
        lines.insert(at, f"{name} = 1\n")
    return "".join(lines).encode(errors="surrogatepass")


def _damaged_text(text, damage, random):
    return damage(text.encode(errors="replace"), random).decode(errors="replace")


def _safetensors(content, random):
    """The header of a file of tensors, its length made to fit; the texts in its metadata as what they are."""
    length = int.from_bytes(content[:8], "little")
    try:
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        metadata = header["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _bytes(content, random)
    choice = random.randrange(4)
    if choice == 0 and isinstance(metadata, dict) and "config" in metadata:
        metadata["config"] = _damaged_text(str(metadata["config"]), _toml, random)
        front = json.dumps(header).encode()
    elif choice == 1 and isinstance(metadata, dict) and metadata.get("tokenizer"):
        metadata["tokenizer"] = _damaged_text(str(metadata["tokenizer"]), _json, random)
        front = json.dumps(header).encode()
    elif choice == 2 and isinstance(metadata, dict) and len(data) >= 4:
        value = random.choice(
            (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\xca\xf2\x49\x71")
        )
        metadata.pop("data_sha256", None)
        every = random.choice((1, 7, len(data)))
        pieces = [value if i % every == 0 else data[4 * i : 4 * i + 4] for i in range(len(data) // 4)]
        front, data = json.dumps(header).encode(), b"".join(pieces)
    else:
        front = _json(content[8 : 8 + length], random)
    return len(front).to_bytes(8, "little") + front + data


def _text(content, random):
    """A text with words that are not words."""
    words = re.split(rb"(\s+)", content)
    at = random.randrange(len(words))
    words[at] = random.choice(
        (b"\x1b]0;title\x07", b"\0", b"\xff\xfe", b"x" * 100_000, "\u202eabc".encode(), b"")
    )
    return b"".join(words)


KINDS = {
    "bytes": _bytes,
    "json": _json,
    "jsonl": _jsonl,
    "toml": _toml,
    "safetensors": _safetensors,
    "text": _text,
}
