"""Write the bundled text data/tales.txt, whose sentences are in plots.txt: python examples/write_tales.py

plots.txt begins with words to insert, the openings, the openings of animals and the closings. Each further
block is a plot, with a line for each of its parts, of which a tale takes one of the alternatives.
"""

import random
import re
from pathlib import Path

HERE = Path(__file__).parent
TALES = 1400
PRONOUNS = {"girl": ("she", "her", "her"), "boy": ("he", "him", "his")}


def filled(part, words):
    part = re.sub(r'(^|[.!?]"? )\{h\}', r"\1{H}", part)  # at the start of a sentence
    return re.sub(r"\b([Aa]) ([aeiou])", r"\1n \2", part.format(**words))


def tale(rng, lists, openings, of_animals, closings, *plots):
    """Return a tale of a hero {n}, a friend {f} and a helper {h}. {s}, {o} and {p} are pronouns."""
    choices = dict(line.split(": ", 1) for line in lists)
    words = {key: rng.choice(values.split(" | ")) for key, values in choices.items()}
    kid = rng.choice([*PRONOUNS])
    name = words[kid]
    friend, is_girl = rng.choice([(words["girl"], True), (words["boy"], False)])
    while friend == name:
        friend = rng.choice(choices["girl" if is_girl else "boy"].split(" | "))
    words |= zip("sop", PRONOUNS[kid], strict=True)
    words |= {"kid": kid, "n": name, "f": friend, "f2": "she" if is_girl else "he"}
    words |= {"S": words["s"].capitalize(), "H": words["h"].capitalize()}
    words["time"] = words["time"].format(**words)
    words["animal"], words["home"] = words["animal"].split(", ")
    opening = rng.choice(of_animals if rng.random() < 0.3 else openings)
    parts = [opening, *(rng.choice(part.split(" | ")) for part in rng.choice(plots)), rng.choice(closings)]
    sentences = [filled(part, words) for part in parts]
    cut = rng.choice([3, 4, 5])
    return " ".join(sentences[:cut]) + "\n" + " ".join(sentences[cut:]) + "\n"


def main():
    blocks = [block.split("\n") for block in (HERE / "plots.txt").read_text().strip().split("\n\n")]
    rng, tales = random.Random(1), {}
    while len(tales) < TALES:
        tales[tale(rng, *blocks)] = None  # in order, and none twice
    (HERE.parent / "data" / "tales.txt").write_text("\n".join(tales))


if __name__ == "__main__":
    main()
