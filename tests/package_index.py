"""A package index with small wheels on this machine, for tests of what is installed from where."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def write_wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any") -> str:
    """Write a wheel of an empty package into a folder, and return its sha256 in hex."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for path, text in files.items()
    }
    record = "".join(f"{p},sha256={digests[p]},{len(files[p])}\n" for p in files)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


class Handler(SimpleHTTPRequestHandler):
    """Lists a folder of wheels as an index does, with their hashes, and remembers what is asked."""

    asked: list[str]

    def do_GET(self) -> None:
        """Answer as an index does; the user and password of a request are not looked at."""
        self.asked.append(self.path)
        folder = Path(self.translate_path(self.path))
        if not folder.is_dir():
            return super().do_GET()
        page = "".join(
            f'<a href="{wheel.name.replace("+", "%2B")}'
            f'#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}">{wheel.name}</a>\n'
            for wheel in sorted(folder.glob("*.whl"))
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
        return None

    def log_message(self, *_words: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve INDEX/PACKAGE/*.whl below a folder; give its address, and the paths that are asked."""
    asked: list[str] = []
    handler = type("Handler", (Handler,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()
