"""A file server that speaks as much WebHDFS (files over HTTP) as fsspec's client asks for, in this process."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

PREFIX = "/webhdfs/v1"
SERVED = pytest.mark.requires("requests", "fsspec's WebHDFS client uses it")


class FileServer(ThreadingHTTPServer):
    """Serves the files below `root`.

    Attributes:
        root: where they are.
        written: the paths of files in the order in which writing to them began.
        writes_left: how many more requests may write; afterwards they fail. None: any number.
        truncate: bytes that are dropped from the end of whatever is written.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.written: list[str] = []
        self.writes_left: int | None = None
        self.truncate = 0

    @property
    def url(self) -> str:
        """What fsspec calls the root."""
        return f"webhdfs://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # header and body in one packet: otherwise each answer waits 40 ms for an acknowledgement

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _ask(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        relative = unquote(parts.path.removeprefix(PREFIX)).strip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            code, headers, data = self._answer(query, self.server.root / relative, relative, body)
        except FileNotFoundError as error:
            code, headers = 404, {}
            data = json.dumps(
                {"RemoteException": {"exception": "FileNotFoundException", "message": str(error)}}
            ).encode()
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = _ask

    def _answer(
        self, query: dict[str, str], path: Path, relative: str, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        operation = query["op"]
        if operation in ("CREATE", "APPEND") and "now" not in query:
            # As HDFS does: the name node answers with the place to write to.
            return 307, {"Location": f"http://127.0.0.1:{self.server.server_port}{self.path}&now=1"}, b""
        if operation in ("CREATE", "APPEND"):
            return self._write(operation, path, relative, body)
        if operation == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
        elif operation == "DELETE":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif operation == "OPEN":
            offset = int(query.get("offset", 0))
            return 200, {}, path.read_bytes()[offset : offset + int(query["length"])]
        elif operation == "GETFILESTATUS":
            return 200, {}, json.dumps({"FileStatus": _status(path)}).encode()
        elif operation == "LISTSTATUS":
            found = [_status(entry) for entry in path.iterdir()]
            return 200, {}, json.dumps({"FileStatuses": {"FileStatus": found}}).encode()
        return 200, {}, b'{"boolean": true}'

    def _write(self, operation: str, path: Path, relative: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.server.writes_left is not None:
            if self.server.writes_left == 0:
                return 503, {}, b""
            self.server.writes_left -= 1
        if operation == "CREATE":
            self.server.written.append(relative)
            path.write_bytes(body)
        else:
            with open(path, "ab") as file:
                file.write(body[: len(body) - self.server.truncate])
        return 201, {}, b""


def _status(path: Path) -> dict[str, Any]:
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    return {"pathSuffix": path.name, "type": kind, "length": path.stat().st_size, "modificationTime": 0}


@contextlib.contextmanager
def file_server(root: Path) -> Iterator[FileServer]:
    """Run a `FileServer` until the block ends."""
    server = FileServer(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
