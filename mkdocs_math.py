"""A hook of MkDocs: formulas of pages and docstrings become MathML, which browsers show without a script.

Docstrings have formulas in the form of Sphinx (``:math:`` and ``.. math::``). They are turned into that of
``pymdownx.arithmatex`` before Markdown sees them, and what it marks is converted in the finished page.
Doctests become blocks of code.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

_INLINE = re.compile(r":math:`([^`]+)`")
_DISPLAY = re.compile(r"^( *)\.\. math::[ \n]*((?:.+\n?)+)", flags=re.MULTILINE)
_DOCTEST = re.compile(r"^( *)>>> (?:.+\n?)+", flags=re.MULTILINE)
_POWER = re.compile(r"(<td[^>]*>(?:<strong>)?)([\d.]+e[-+]\d+)")
_MARKED = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', flags=re.DOTALL)


class _FromSphinx(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines)
        # A formula may be broken over lines, in the middle of a sentence.
        text = _DISPLAY.sub(
            lambda found: f"{found[1]}$$\n{found[1]}{_joined(found[2])}\n{found[1]}$$\n", text
        )
        text = _INLINE.sub(lambda found: rf"\({_joined(found[1])}\)", text)
        if "```" not in text:
            text = _DOCTEST.sub(
                lambda found: f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n", text
            )
        return text.split("\n")


def _joined(formula: str) -> str:
    return " ".join(formula.split())


class _Sphinx(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_FromSphinx(md), "sphinx_math", 200)


def on_config(config: Any) -> Any:
    """Read formulas in the form of Sphinx too."""
    config["markdown_extensions"].append(_Sphinx())
    return config


def on_post_page(output: str, **_: Any) -> str:
    """Convert what is marked as a formula, and keep powers of ten in tables on one line."""

    def mathml(found: re.Match[str]) -> str:
        formula = html.unescape(found[2].strip())
        if found[1] == "span":
            return convert(formula)
        return f'<div class="formula">{convert(formula, display="block")}</div>'

    output = _POWER.sub(r'\1<span class="number">\2</span>', output)
    return _MARKED.sub(mathml, output)
