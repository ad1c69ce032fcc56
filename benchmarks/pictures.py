"""Draws the picture of the page on the idea: ``python -m benchmarks.pictures``."""

from __future__ import annotations

from benchmarks.all import ROOT

PICTURE = ROOT / "docs" / "idea.svg"
_LAYERS, _CUT = 6, 3
_WIDTH, _HEIGHT, _LEFT = 76, 34, 90


def _box(x: float, y: float, text: str, is_held: bool) -> str:
    fill, dash = ("#3f51b5", "") if is_held else ("none", ' stroke-dasharray="4 3"')
    ink = "#ffffff" if is_held else "#888888"
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDTH - 10}" height="{_HEIGHT}" rx="4" fill="{fill}"'
        f' stroke="#3f51b5"{dash}/>'
        f'<text x="{x + (_WIDTH - 10) / 2}" y="{y + 22}" fill="{ink}" text-anchor="middle">'
        f"{text}</text>"
    )


def svg() -> str:
    """Two stages, each with a whole step: the layers that run there, and the values of others."""
    width = _LEFT + _LAYERS * _WIDTH + 10
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 190"'
            ' font-family="sans-serif" font-size="13">'
        )
    ]
    for stage, y in enumerate((30, 120)):
        lines.append(f'<text x="6" y="{y + 22}" fill="#888888">stage {stage}</text>')
        for layer in range(_LAYERS):
            is_held = (layer >= _CUT) == bool(stage)
            text = f"layer {layer}" if is_held else "a value"
            lines.append(_box(_LEFT + layer * _WIDTH, y, text, is_held))
    x = _LEFT + _CUT * _WIDTH - 5
    lines += [
        f'<path d="M{x} 64 V118" stroke="#e65100" stroke-width="2" fill="none"/>',
        (
            f'<path d="M{x - 5} 110 L{x} 119 L{x + 5} 110" stroke="#e65100" stroke-width="2"'
            ' fill="none"/>'
        ),
        f'<text x="{x + 10}" y="96" fill="#e65100">the tensor</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(svg())
