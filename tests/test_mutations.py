"""The list of mutations fits the code: whoever changes a line that is in it changes the list too."""

from pathlib import Path

from mutations.mutations import MUTATIONS

TESTS = Path(__file__).parent


def misfit(mutation):
    """What is wrong with an entry, or "" if it changes one place of the package and its tests are there."""
    file = TESTS.parent / "distgpt" / mutation.file
    if not file.exists() or not (TESTS / mutation.tests.split()[0]).exists():
        return "no such file"
    text = file.read_text()
    if text.count(mutation.old) != 1:
        return f"{mutation.old!r} stands there {text.count(mutation.old)} times"
    changed = text.replace(mutation.old, mutation.new)
    if file.suffix == ".py":
        compile(changed, mutation.file, "exec")
    return "nothing changes" if changed == text else ""


def test_every_mutation_changes_one_place_of_the_package():
    misfits = [f"{m.fault}: {m.file}: {wrong}" for m in MUTATIONS if (wrong := misfit(m))]
    assert not misfits, "\n".join(misfits)
    assert len({mutation.fault for mutation in MUTATIONS}) == len(MUTATIONS) >= 40
