"""What an agent and its fleet do, for Prometheus: its text format over HTTP, without a library.

Source: prometheus.io/docs/instrumenting/exposition_formats, text format 0.0.4.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from miofind.errors import InvalidOptionError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure.

    Attributes:
        name: without the prefix "miofind_".
        kind: "counter" or "gauge".
        about: one line of help.
        values: (labels, value), one of each set of labels.
    """

    name: str
    kind: str
    about: str
    values: tuple[tuple[Mapping[str, str], float], ...] = field(default_factory=tuple)


def text_of(metrics: Iterable[Metric]) -> str:
    """Metrics in Prometheus' text format."""
    lines = []
    for metric in metrics:
        name = f"miofind_{metric.name}"
        lines += [f"# HELP {name} {metric.about}", f"# TYPE {name} {metric.kind}"]
        for labels, value in metric.values:
            told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"{name}{{{told}}} {value:.17g}" if told else f"{name} {value:.17g}")
    return "\n".join(lines) + "\n"


class MetricsServer:
    """Answers GET /metrics, in a thread of its own.

    Args:
        address: to listen at; whoever reaches it can read the figures.
        port: 0 for any that is free.
        collect: the figures now.

    Raises:
        InvalidOptionError: the port cannot be had.
    """

    def __init__(self, address: str, port: int, collect: Callable[[], Iterable[Metric]]) -> None:
        try:
            self._server = ThreadingHTTPServer((address, port), _handler_of(collect))
        except OSError as error:
            raise InvalidOptionError(f"metrics cannot be answered at {address}:{port}: {error.strerror}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="miofind-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Answer nothing more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler_of(collect: Callable[[], Iterable[Metric]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers one request."""

        timeout = 10.0

        def do_GET(self) -> None:  # http.server's name
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = text_of(collect()).encode()
            self.send_response(200)
            self.send_header("Content-Type", _TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            logger.debug(format, *arguments)

    return Handler


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
