"""The colours of charts and pages can be read and told apart by everyone."""

import itertools

import numpy as np
from pages import PAGE_COLOURS as COLOURS

from distgpt.show.plot import SERIES

# How colours look to people who lack one kind of cone (Machado, Oliveira and Fernandes, 2009), severity 1.
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "deutan": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "tritan": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}
# Oklab, a space whose distances are those that are seen: from linear colours to cones, from their roots on.
CONES = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
OKLAB = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))


def linear(colour):
    parts = np.array(list(bytes.fromhex(colour[1:]))) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    dark, light = sorted(float(np.dot((0.2126, 0.7152, 0.0722), linear(x))) for x in (one, other))
    return (light + 0.05) / (dark + 0.05)


def seen(colour, eye):
    """Where a colour lies in Oklab."""
    return np.dot(OKLAB, np.cbrt(np.dot(CONES, np.clip(np.dot(eye, linear(colour)), 0, 1))))


def test_colours_can_be_read_and_told_apart_by_everyone():
    for ink, behind in (
        *((ink, "paper") for ink in ("ink", "muted", "accent")),
        ("ink", "surface"),
    ):
        assert contrast(COLOURS[ink], COLOURS[behind]) >= 4.5, (ink, behind)
    assert all(contrast(colour, COLOURS["paper"]) >= 3 for colour in SERIES)
    for name, eye in EYES.items():
        places = [seen(colour, eye) for colour in SERIES]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)) > 0.08, name
