"""Makes figures of matplotlib, which is an extra, without its global state: in any thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.files import appearing


def new_figure(width: float, height: float) -> Any:
    """An empty ``matplotlib.figure.Figure``, with sizes in inches.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def require_matplotlib() -> None:
    """Raises ConfigurationError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "Pictures are drawn with matplotlib, which is not installed. Use `pip install"
            " lightning-pipeshift[pictures]`, or leave the picture out: the text that is printed"
            " shows the same."
        ) from error


def save(figure: Any, path: Path) -> None:
    """Writes a figure; the name's ending chooses the format. Readers see it whole or not at all."""
    kind = path.suffix.removeprefix(".") or "png"
    with appearing(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=110)
