"""A hub imitation on 127.0.0.1 for one data set, as far as huggingface_hub 1.33 asks: repository info, file listing, HEAD and GET of files."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@contextmanager
def imitation(folder: Path, repo: str, *, commit: str = COMMIT, cut: tuple[str, int] | None = None, moved: str | None = None):
    """Serve the files under `folder` as data set `repo`. -> (address, list of requests "METHOD path" so far).

    cut: (file, n): send only n bytes of it and close; moved: answer everything with 308 and this Location.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, status: int, body: bytes = b"", **headers):
            self.send_response(status)
            for key, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(key.replace("_", "-"), str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            asked.append(f"{self.command} {path}")
            if moved:
                return self.answer(308, Location=moved + path)
            files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != "fetch.json")
            entries = [
                {
                    "type": "file",
                    "rfilename": f,
                    "path": f,
                    "size": (folder / f).stat().st_size,
                    "oid": hashlib.sha1((folder / f).read_bytes()).hexdigest(),
                }
                for f in files
            ]
            api = f"/api/datasets/{repo}"
            if path.startswith((f"{api}/revision/", f"{api}/tree/")) and path.split("/")[6] not in ("main", commit):
                return self.answer(404, b'{"error": "Invalid rev id"}', X_Error_Code="RevisionNotFound")
            if path == api or path.startswith(f"{api}/revision/"):
                return self.answer(200, json.dumps({"_id": "1", "id": repo, "sha": commit, "siblings": entries}).encode())
            if path.startswith(f"{api}/tree/"):
                return self.answer(200, json.dumps(entries).encode())
            place = path.removeprefix(f"/datasets/{repo}/resolve/{commit}/")
            if place not in files:
                return self.answer(404, b"{}", X_Error_Code="EntryNotFound")
            body = (folder / place).read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
            if cut and self.command == "GET" and place == cut[0]:
                self.send_response(200)
                for key, value in {"Content-Length": len(body), **headers}.items():
                    self.send_header(key.replace("_", "-"), str(value))
                self.end_headers()
                self.wfile.write(body[: cut[1]])
                self.close_connection = True
                return None
            return self.answer(200, body, **headers)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
