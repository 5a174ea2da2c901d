"""A small OTLP receiver: HTTP with protobuf bodies, decoded, and the ways in which a receiver can be bad."""

from __future__ import annotations

import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class OtlpReceiver:
    """`with OtlpReceiver() as receiver:`; `manner`: `good`, `fails` (500) or `hangs` (takes the body and never answers)."""

    def __init__(self, manner: str = "good") -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.num_requests = 0
        self._manner = manner
        self._released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.num_requests += 1
                if receiver._manner == "hangs":
                    receiver._released.wait(60)
                    return
                status = 500 if receiver._manner == "fails" else receiver._take(self.path, self.headers, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OtlpReceiver:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def _take(self, path: str, headers: Any, body: bytes) -> int:
        if path != "/v1/traces" or headers["content-type"] != "application/x-protobuf":
            return 404
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(resource.resource))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return 200

    def trace_of(self, request_id: str, within_s: float = 60.0) -> list[Span]:
        """All spans of the trace whose request has this id, once they have come; the request's own span first."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for root in list(self.spans):
                if attributes(root).get("dspark.request_id") == request_id:
                    others = [s for s in self.spans if s.trace_id == root.trace_id and s.span_id != root.span_id]
                    return [root, *others]
            time.sleep(0.02)
        raise AssertionError(f"no trace of {request_id} came within {within_s} s")


def attributes(holder: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in holder.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
