"""What `miofind tune --dry-run` prints."""

from __future__ import annotations

from collections.abc import Sequence

from miofind.cli.output import Sheet, print_json, print_text, seconds_text
from miofind.tune.forecast import Forecast

_COLUMNS = ("device", "problems", "known", "unsolvable", "solvers", "configurations", "compiles", "cached", "GPU time")
_NUMBERS = _COLUMNS[1:]
_SPARE = ("unsolvable", "solvers", "cached")


def print_forecasts(forecasts: Sequence[Forecast], *, as_json: bool) -> None:
    """Print a row a kind of device and how long all may take."""
    if as_json:
        print_json({"forecasts": [_json(forecast) for forecast in forecasts]})
        return
    sheet = Sheet("", _COLUMNS, right=_NUMBERS, spare=_SPARE)
    for forecast in forecasts:
        name = forecast.device.name if forecast.devices == 1 else f"{forecast.devices} x {forecast.device.name}"
        found = (forecast.problems, forecast.known, forecast.unsolvable, len(forecast.solvers))
        work = (forecast.configurations, forecast.compiles, forecast.compiled)
        sheet.add(name, *map(str, found + work), seconds_text(forecast.gpu_seconds))
    sheet.print()
    for forecast in forecasts:
        print_text(_about(forecast))


def _about(forecast: Forecast) -> str:
    if not forecast.configurations:
        return f"{forecast.device.name}: nothing to measure"
    share = f", {seconds_text(forecast.gpu_seconds / forecast.devices)} on each" if forecast.devices > 1 else ""
    basis = (
        f"estimates corrected by {forecast.calibration:.2f}x, from {forecast.calibrated_by} known times"
        if forecast.calibrated_by
        else "by the solvers' estimates alone, since nothing is known here yet"
    )
    return f"{forecast.device.name}: about {forecast.gpu_seconds / 60:.1f} GPU-minutes{share}; {basis}"


def _json(forecast: Forecast) -> dict[str, object]:
    return {
        "device": forecast.device.identity,
        "devices": forecast.devices,
        "problems": forecast.problems,
        "known": forecast.known,
        "unsolvable": forecast.unsolvable,
        "solvers": list(forecast.solvers),
        "configurations": forecast.configurations,
        "compiles": forecast.compiles,
        "compiled": forecast.compiled,
        "calibration": forecast.calibration,
        "calibrated_by": forecast.calibrated_by,
        "gpu_minutes": forecast.gpu_seconds / 60,
        "minutes": forecast.gpu_seconds / 60 / forecast.devices,
    }
