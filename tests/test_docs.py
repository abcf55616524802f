"""Every Python block of README and docs runs, every page is in the navigation, and the site shows it well."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
SLOW = {"docs/experiments.md"}


def label(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def with_code() -> list[Any]:
    pages = [page for page in PAGES[1:] if BLOCK.search(page.read_text(encoding="utf-8"))]
    slow = pytest.mark.slow
    return [pytest.param(page, id=label(page), marks=slow if label(page) in SLOW else ()) for page in pages]


def run(page: Path) -> dict[str, Any]:
    """Run the blocks of a page one after the other, as a reader would."""
    names: dict[str, Any] = {"__name__": label(page)}
    kept = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        for code in BLOCK.findall(page.read_text(encoding="utf-8")):
            exec(compile(code, label(page), "exec"), names)
    except ModuleNotFoundError as error:  # of an optional integration
        if (error.name or "").split(".")[0] in ("blockhf", "blockhf_lab", "torch"):
            raise
        pytest.skip(f"{error.name} is not installed")
    finally:
        torch.set_default_dtype(kept)
    return names


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and the variables of torchrun with one process."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("page", with_code())
def test_the_code_of_a_page_runs(page: Path) -> None:
    names = run(page)
    if page.name == "physics.md":
        assert float(names["loss"]) < 1e-5
        assert float(names["error"]) < 1e-3


def test_the_readme_shows_what_its_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    run(ROOT / "README.md")
    printed = capsys.readouterr().out.splitlines()
    shown = re.findall(r"^step .*$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(printed) == 30
    assert [line.split(":")[0] for line in shown[:2]] == ["step 1", "step 2"]
    form = re.compile(
        r"step \d+: loss [\d.]+(, held out [\d.]+)?( -> [\d.]+)?; .*(CG|small) steps.*; [\d.]+ s(;.*)?"
    )
    assert all(form.fullmatch(line) for line in (*printed[:2], *printed[-2:], *shown))
    losses = [float(line.split()[3].rstrip(",;")) for line in printed]
    assert losses[-1] < losses[0] / 20


def test_the_readme_is_short_and_its_links_are_absolute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]+)\)", text))
    prose = re.sub(r"```.*?```|<!--.*?-->|^\|.*?$|\]\([^)]*\)", " ", text, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"\w[\w'.-]*", prose)) <= 500


def test_every_promise_of_the_readme_has_a_test_or_a_command() -> None:
    readme, rules = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    table = rules[rules.index("| README | kept by |") : rules.index("## Style")]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table, flags=re.MULTILINE)[1:]
    promises = [promise for own, _ in rows for promise in own.split(", ") if own != "Any model, any loss"]
    assert all(promise in readme for promise in promises if promise != "figure")
    features = re.findall(r"^- \[(.+?)\]", readme, flags=re.MULTILINE)
    assert set(features) <= {own for own, _ in rows}
    for _, kept in rows:
        named = re.findall(r"(?:tests|results|benchmarks)/[\w/.-]*\w", kept)
        assert named or "`" in kept
        assert all((ROOT / path).exists() for path in named), named


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    assert {page for page in pages if not page.startswith("notes/")} <= named
    assert named <= pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; skipped where the site's generator is not installed."""
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package, reason="needs pip install 'blockhf[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_no_page_shows_raw_latex(site: Path) -> None:
    formulas = 0
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        formulas += text.count("<math")
        shown = re.sub(r"<(script|style|pre|code)\b.*?</\1>", " ", text, flags=re.DOTALL)
        shown = re.sub(r"<[^>]*>", " ", shown)
        found = re.findall(r":math:|\.\. math|\\\(|\\\[|\$\$|\\(?:top|lambda|sum|frac|mathbb|le)\b", shown)
        assert not found, f"{page.name} shows {found[:3]}"
    assert formulas > 30


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = """<script>addEventListener("load", () => {
    const tables = [...document.querySelectorAll(".md-typeset__table")]
    const cut = tables.filter(table => table.scrollWidth > table.clientWidth + 1)
    document.title = "width:" + document.documentElement.scrollWidth + ", cut:" + cut.length
})</script></head>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 500])
def test_no_page_and_no_table_is_wider_than_the_window(site: Path, width: int) -> None:
    """Headless Chromium has windows of 500 pixels at least."""
    assert CHROMIUM is not None
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("</head>", PROBE), encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=3000",
        ]
        command = [CHROMIUM, *options, f"--window-size={width},900", "--dump-dom", page.as_uri()]
        try:
            dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        finally:
            page.write_text(text, encoding="utf-8")
        ((found, cut),) = re.findall(r"<title>width:(\d+), cut:(\d+)</title>", dom)
        assert int(found) <= width, f"{page.relative_to(site)} is {found} pixels wide"
        assert width < 1280 or cut == "0", f"{page.relative_to(site)} has {cut} tables that are cut"
