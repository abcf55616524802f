"""The gallery's page of examples is made from what they print and return."""

from __future__ import annotations

from pathlib import Path

from blockhf_lab import examples_page


def test_the_page_has_words_picture_and_last_lines_of_each_example(tmp_path: Path) -> None:
    small = {
        "mlp": ["--steps", "3", "--samples", "200", "--width", "4"],
        "policy": ["--steps", "2", "--poles", "8", "--length", "20", "--width", "4"],
    }
    examples_page.main(tmp_path, small)
    page = (tmp_path / "examples.md").read_text()
    for name in small:
        assert f"## {examples_page.TITLES[name]}\n" in page
        assert f"$ python examples/{name}.py\n" in page
        assert (tmp_path / "images" / f"example-{name}.png").stat().st_size > 5_000
    assert "It learns to tell the arms of three spirals apart." in page
    assert "accuracy on new points" in page


def test_every_example_but_those_of_trainers_is_on_the_page() -> None:
    found = {path.stem for path in (examples_page.ROOT / "examples").glob("*.py")}
    assert found == set(examples_page.TITLES)
    page = (examples_page.ROOT / "docs" / "gallery" / "examples.md").read_text()
    assert all(f"## {title}\n" in page for title in examples_page.TITLES.values())
