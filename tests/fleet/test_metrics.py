"""An agent's figures in Prometheus' text format."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from miofind.errors import InvalidOptionError
from miofind.fleet.metrics import LOOPBACK, Metric, MetricsServer, text_of

METRICS = (
    Metric(name="jobs", kind="gauge", about="Jobs.", values=(({"device": 'a "b"\\c\n'}, 3), ({"device": "d"}, 0.25))),
    Metric(name="age_seconds", kind="gauge", about="Age.", values=(({}, 1e-9),)),
    Metric(name="none_total", kind="counter", about="Nothing."),
)


@pytest.fixture
def url() -> Iterator[str]:
    server = MetricsServer(LOOPBACK, 0, lambda: METRICS)
    yield f"http://{LOOPBACK}:{server.port}"
    server.close()


def test_the_text_is_of_prometheus() -> None:
    assert text_of(METRICS).splitlines() == [
        "# HELP miofind_jobs Jobs.",
        "# TYPE miofind_jobs gauge",
        'miofind_jobs{device="a \\"b\\"\\\\c\\n"} 3',
        'miofind_jobs{device="d"} 0.25',
        "# HELP miofind_age_seconds Age.",
        "# TYPE miofind_age_seconds gauge",
        "miofind_age_seconds 1.0000000000000001e-09",
        "# HELP miofind_none_total Nothing.",
        "# TYPE miofind_none_total counter",
    ]


def test_a_port_that_is_taken_is_told(url: str) -> None:
    with pytest.raises(InvalidOptionError, match="in use"):
        MetricsServer(LOOPBACK, int(url.rpartition(":")[2]), lambda: METRICS)


def test_it_is_answered_over_http(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert answer.read().decode() == text_of(METRICS)
    with pytest.raises(urllib.error.HTTPError, match="404") as raised:
        urllib.request.urlopen(f"{url}/")
    raised.value.close()
