"""The list of mutations fits the code: whoever changes a line that is in it changes the list too."""

from pathlib import Path

from mutations.mutations import MUTATIONS

TESTS = Path(__file__).parent


def test_every_mutation_changes_one_place_of_the_package():
    for mutation in MUTATIONS:
        text = (TESTS.parent / "distgpt" / mutation.file).read_text()
        assert text.count(mutation.old) == 1, (
            f"{mutation.fault}: {mutation.file} has {mutation.old!r} not once"
        )
        compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
        assert mutation.old != mutation.new and (TESTS / mutation.tests.split()[0]).exists(), mutation
    assert len({mutation.fault for mutation in MUTATIONS}) == len(MUTATIONS) >= 40
