"""The list of mutations fits the code."""

from conftest import TESTS
from mutations.mutations import MUTATIONS
from mutations.sampling import changed, mutants_of, sample


def misfit(mutation):
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


def test_mutations_change_one_place_each():
    misfits = [f"{m.fault}: {m.file}: {wrong}" for m in MUTATIONS if (wrong := misfit(m))]
    assert not misfits, "\n".join(misfits)
    assert len({mutation.fault for mutation in MUTATIONS}) == len(MUTATIONS) >= 40


SOURCE = """
def clipped(x, low, high=3):
    if x < low and x is not None:
        return max(low, x)
    print(x + 1)
    return x * 2 if not high else "as it is"
"""
EXPECTED = {
    ("comparison", "x < low", "(x <= low)"),
    ("condition", "x < low and x is not None", "True"),
    ("arguments", "low, x", "x, low"),
    ("statement", "print(x + 1)", "pass"),
    ("return", "return max(low, x)", "return None"),
}


def test_mutants_change_one_place_and_are_stable_under_edits(tmp_path):
    (path := tmp_path / "room" / "file.py").parent.mkdir()
    path.write_text(SOURCE)
    found = mutants_of(path, tmp_path)
    assert {(m.kind, m.old, m.new) for m in found} > EXPECTED
    for mutant in found:
        text = changed(mutant, path.read_bytes())
        assert text != SOURCE and compile(text, "file.py", "exec")
    before = [m.name for m in sample(tmp_path, per_room=5)]
    path.write_text("# ä comment\n" + SOURCE + "\n# another\n")
    assert [m.name for m in sample(tmp_path, per_room=5)] == before and len(before) == 5
