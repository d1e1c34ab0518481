"""Corrupt a file: changed bytes, unusual values in a document, changed text. Equal seeds give equal damage."""

import json
import re

# Spellings of one JSON value. TOML also allows some.
NASTY = [
    *("null", "true", "false", "0", "-1", "1", "3", "1.9", "-0.0", "0.5", "1e308", "-1e308", "1e400", "NaN"),
    *("Infinity", "-Infinity", "2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 30),
    *("9" * 5000, "1e-320", '""', '"a"', '"\\u0000"', '"\\u001b[2J\\u001b[31m"', '"\\ud800"', '"\\u202e"'),
    *('"' + "x" * 10_000 + '"', '"nan"', '"../../../etc/passwd"', '"/dev/zero"', '"1"', '"%s%n{0}"'),
    *("[]", "{}", "[[]]", '{"a": {}}', "[1, 2, 3]", "[" * 3000 + "]" * 3000),
    '{"a":' * 2000 + "1" + "}" * 2000,
]  # fmt: skip
_INSERTED = (b"\0", b"\xff", b"\x1b[31m", b"\r", b"\n", b'"', b"{", b"\xed\xa0\x80", b"\xe2\x80\xae")
_ELEMENTS = (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f")  # NaN, infinity, the largest
_WORDS = (b"\x1b]0;title\x07", b"\0", b"\xff\xfe", b"x" * 100_000, "\u202eabc".encode(), b"")
_NAMES = ("", "\0", "\x1b[1m", "x" * 1000, "\ud800")
_TOML = ('"\\u001b[31m" = 1', "a.b.c = 1", "a." * 50_000 + "b = 1", '"" = 1', "[x]", "[" * 3000)
_MARK = "@@0@@"


def damaged(content, kind, random):
    """Return the content of a file of this kind with one to three faults."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        wild = random.random() < 0.3
        content = _bytes(content, random) if wild else KINDS[kind](content, random)
    return content


def _bytes(content, random):
    """Flip, drop, repeat or insert bytes."""
    if not content:
        return random.randbytes(random.randrange(1, 40))
    at, length = random.randrange(len(content)), random.choice((1, 1, 2, 8, 64, 1000))
    front, some, rest = content[:at], content[at : at + length], content[at + length :]
    return random.choice(
        (
            front + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :],
            front,
            front + rest,
            front + some * random.choice((2, 3, 100)) + rest,
            front + random.randbytes(length) + rest,
            front + random.choice(_INSERTED) + content[at:],
        )
    )


def _json(content, random):
    """Replace, remove, duplicate or rename one value."""
    try:
        document = json.loads(content)
        places = list(_places(document))
    except (ValueError, RecursionError):
        return _bytes(content, random)
    if not places:
        return random.choice(NASTY).encode()
    holder, key = random.choice(places)
    choice = random.randrange(8)
    if choice < 5:
        holder[key] = _MARK
    elif choice == 5:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[random.choice((*_NAMES, key + " "))] = holder.pop(key)
    return json.dumps(document).replace(f'"{_MARK}"', random.choice(NASTY)).encode()


def _places(document):
    """Yield (holder, key) of every value in a document."""
    if not isinstance(document, dict | list):
        return
    for key, value in list(document.items() if isinstance(document, dict) else enumerate(document)):
        yield document, key
        yield from _places(value)


def _jsonl(content, random):
    """Change one line, duplicate it, or join it to the next."""
    lines = content.splitlines(keepends=True)
    if not lines:
        return _bytes(content, random)
    at = random.randrange(len(lines))
    damaged = (lines[at] * 2, lines[at].rstrip(b"\n"), *(_json(lines[at], random) + b"\n" for _ in range(4)))
    return b"".join([*lines[:at], random.choice(damaged), *lines[at + 1 :]])


def _toml(content, random):
    """Replace one value, or drop, duplicate or invent a line."""
    lines = content.decode(errors="replace").splitlines(keepends=True)
    values = [i for i, line in enumerate(lines) if "=" in line]
    if not values:
        return _bytes(content, random)
    at = random.choice(values)
    replaced = [f"{lines[at].partition('=')[0]}= {random.choice(NASTY)}\n" for _ in range(5)]
    lines[at] = random.choice(("", lines[at] * 2, random.choice(_TOML) + "\n" + lines[at], *replaced))
    return "".join(lines).encode(errors="surrogatepass")


def _safetensors(content, random):
    """Change the header of a tensor file, a string in its metadata, or elements; correct the length."""
    length = int.from_bytes(content[:8], "little")
    front, data = content[8 : 8 + length], content[8 + length :]
    choice = random.choice(("header", "header", "config", "tokenizer", "elements"))
    try:
        header = json.loads(front)
        metadata = header["__metadata__"]
        if choice in ("config", "tokenizer"):
            damage = _toml if choice == "config" else _json
            metadata[choice] = damage(metadata[choice].encode(), random).decode(errors="replace")
        elif choice == "elements":
            metadata.pop("data_sha256", None)
            value, every = random.choice(_ELEMENTS), random.choice((1, 7, len(data) + 1))
            pieces = [value if i % every == 0 else data[4 * i : 4 * i + 4] for i in range(len(data) // 4)]
            data = b"".join(pieces)
        front = _json(front, random) if choice == "header" else json.dumps(header).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _bytes(content, random)
    return len(front).to_bytes(8, "little") + front + data


_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _gguf(content, random):
    """Change a number before a GGUF file's data."""
    try:
        at, width = random.choice(list(_gguf_fields(content)))
    except (IndexError, KeyError):
        return _bytes(content, random)
    old = int.from_bytes(content[at : at + width], "little")
    values = (0, 1, 2, 3, old ^ 1, old + 1, old - 1, old * 2, old << 8, 32, 255, 1 << 30, 1 << 40, 1 << 63, -1)
    value = random.choice((*values, random.getrandbits(8 * width))) % (1 << 8 * width)
    return content[:at] + value.to_bytes(width, "little") + content[at + width :]


def _gguf_fields(content):
    """Return the offset and width of each number before the data. Lists contribute their first and last."""

    def number(at, width):
        found = int.from_bytes(content[at : at + width], "little")
        if at + width > len(content) or (width == 8 and found > len(content)):
            raise IndexError  # an earlier fault
        return found

    def value(at, kind):
        if kind == 8:
            fields.append((at, 8))
            return at + 8 + number(at, 8)
        if kind != 9:
            fields.append((at, _WIDTHS[kind]))
            return at + _WIDTHS[kind]
        inner, count = number(at, 4), number(at + 4, 8)
        fields.extend(((at, 4), (at + 4, 8)))
        at += 12
        for i in range(count):
            before = len(fields)
            at = value(at, inner)
            if 0 < i < count - 1:
                del fields[before:]
        return at

    fields = [(4, 4), (8, 8), (16, 8)]
    at = 24
    for _ in range(number(16, 8)):
        at = value(at, 8)
        fields.append((at, 4))
        at = value(at + 4, number(at, 4))
    for _ in range(number(8, 8)):
        at = value(at, 8)
        fields += [(at, 4), *((at + 4 + 8 * i, 8) for i in range(min(4, number(at, 4))))]
        at += 4 + 8 * number(at, 4)
        fields += [(at, 4), (at + 4, 8)]
        at += 12
    return fields


def _text(content, random):
    """Replace a word by an invalid one."""
    words = re.split(rb"(\s+)", content)
    words[random.randrange(len(words))] = random.choice(_WORDS)
    return b"".join(words)


KINDS = {"bytes": _bytes, "json": _json, "jsonl": _jsonl, "toml": _toml, "safetensors": _safetensors, "gguf": _gguf}
KINDS["text"] = _text
