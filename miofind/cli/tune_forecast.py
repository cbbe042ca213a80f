"""What `miofind tune --dry-run` prints."""

from __future__ import annotations

from collections.abc import Sequence

from miofind.cli.output import Sheet, print_json, print_text, seconds_text
from miofind.device.device import Place
from miofind.tune.forecast import Forecast

_COLUMNS = ("device", "problems", "known", "unsolvable", "solvers", "configurations", "compiles", "cached", "measuring")
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
        sheet.add(name, *map(str, found + work), seconds_text(forecast.measuring_seconds))
    sheet.print()
    for forecast in forecasts:
        print_text(_about(forecast))


def _about(forecast: Forecast) -> str:
    name = forecast.device.name
    if not forecast.configurations:
        return f"{name}: nothing to measure"
    basis = (
        f"estimates corrected by {forecast.calibration:.2f}x, from {forecast.calibrated_by} known times"
        if forecast.calibrated_by
        else "by the solvers' estimates alone, since nothing is known here yet"
    )
    return f"{name}: about {_measuring(forecast)}{_compiling(forecast)}; {basis}"


def _measuring(forecast: Forecast) -> str:
    seconds = seconds_text(forecast.measuring_seconds)
    if forecast.device.place is Place.CPU:
        return f"{seconds} on the CPU"
    share = seconds_text(forecast.measuring_seconds / forecast.devices)
    return f"{seconds} of GPU time" + (f", {share} on each GPU" if forecast.devices > 1 else "")


def _compiling(forecast: Forecast) -> str:
    count = forecast.compiles - forecast.compiled
    seconds = seconds_text(forecast.compiling_seconds)
    return f", and {seconds} beside it for {count} kernels that this host compiles" if count else ""


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
        "measuring_minutes": forecast.measuring_seconds / 60,
        "measuring_minutes_each": forecast.measuring_seconds / 60 / forecast.devices,
        "compiling_minutes": forecast.compiling_seconds / 60,
    }
