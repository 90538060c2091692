"""A hub imitation on 127.0.0.1, as far as huggingface_hub 1.33 asks: repository info, file listing, HEAD and GET of files, in ranges too."""

import contextlib
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
LFS = (".safetensors", ".pth", ".parquet", ".mp4")


def entry(file: Path, name: str) -> dict:
    """A file as the hub lists it, by the hub's own computation, not ours: git's blob id, and the SHA-256 of what lies in LFS."""
    body = file.read_bytes()
    sha256 = hashlib.sha256(body).hexdigest()
    lfs = {"oid": sha256, "sha256": sha256, "size": len(body), "pointerSize": 130}
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{lfs['oid']}\nsize {len(body)}\n".encode()
    held = pointer if name.endswith(LFS) else body
    blob = hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()
    return {"type": "file", "path": name, "rfilename": name, "size": len(body), "oid": blob, **({"lfs": lfs} if name.endswith(LFS) else {})}


class Hub:
    """Repositories as folders, at one commit or each at its own: {"org/name": folder} for models, {"datasets/org/name": folder} for data sets.

    asked: requests "METHOD path" so far. answer(path): None, or (status, headers) instead of the reply. cut: {file: n}, the connection
    breaks after n bytes of it, however often it is asked for. pause: {file: seconds} between its first half and its second, once.
    """

    def __init__(self, repos: dict[str, Path], commit: str = COMMIT, commits: dict[str, str] | None = None):
        self.commit_of = lambda repo: (commits or {}).get(repo, commit)
        self.repos, self.asked, self.cut, self.pause = repos, [], {}, {}
        self.answer = lambda path: None
        self.closing = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path = unquote(urlsplit(self.path).path)
                hub.asked.append(f"{self.command} {path}")
                status, headers, *body = hub.answer(path) or hub.reply(path)
                self.send(status, headers, body[0] if body else b"", re.split("/resolve/[0-9a-f]{40}/", path)[-1])

            do_HEAD = do_GET

            def send(self, status: int, headers: dict, body: bytes, name: str):
                end, begin = len(body), 0
                if status == 200 and (wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
                    begin, end = int(wanted[1]), min(int(wanted[2] or end) + 1, end)
                    headers, status = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(body)}"}, 206
                self.send_response(status)
                for key, value in {"Content-Length": str(end - begin), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that has given up
                    if name in hub.pause:
                        middle = (begin + end) // 2
                        self.wfile.write(body[begin:middle])
                        self.wfile.flush()
                        hub.closing.wait(hub.pause.pop(name))
                        begin = middle
                    self.wfile.write(body[begin : min(end, hub.cut.get(name, end))])
                    self.wfile.flush()
                self.close_connection = name in hub.cut

            def log_message(self, *args):
                """Quiet: pytest shows what matters."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, path: str):
        api = path.startswith("/api/")
        rest = path.removeprefix("/api/").removeprefix("models/") if api else path.removeprefix("/")
        repo = next((r for r in self.repos if rest == r or rest.startswith(f"{r}/")), None)
        if repo is None:
            return 404, {"X-Error-Code": "RepoNotFound"}
        folder, rest = self.repos[repo], rest.removeprefix(repo).strip("/").split("/", 2)
        if len(rest) > 1 and rest[1] not in (self.commit_of(repo), "main"):
            return 404, {"X-Error-Code": "RevisionNotFound"}
        files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "fetch.json"}
        if api:
            entries = [entry(file, name) for name, file in files.items()]
            info = {"_id": "1", "id": repo.removeprefix("datasets/"), "sha": self.commit_of(repo), "siblings": entries}
            return 200, {"Content-Type": "application/json"}, json.dumps(entries if rest[0] == "tree" else info).encode()
        if rest[2] not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}
        known, body = entry(files[rest[2]], rest[2]), files[rest[2]].read_bytes()
        return 200, {"ETag": f'"{known.get("lfs", known)["oid"]}"', "X-Repo-Commit": self.commit_of(repo), "Accept-Ranges": "bytes"}, body


@contextmanager
def serve(repos: dict[str, Path], commit: str = COMMIT, commits: dict[str, str] | None = None):
    hub = Hub(repos, commit, commits)
    threading.Thread(target=hub.server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.server.shutdown()
        hub.server.server_close()


@contextmanager
def imitation(folder: Path, repo: str, *, cut: tuple[str, int] | None = None, moved: str | None = None):
    """Serve the files under `folder` as data set `repo`. -> (address, list of requests "METHOD path" so far).

    cut: (file, n): send only n bytes of it and close; moved: answer everything with 308 and this Location.
    """
    with serve({f"datasets/{repo}": folder}) as hub:
        hub.cut = dict([cut] if cut else [])
        if moved:
            hub.answer = lambda path: (308, {"Location": moved + path})
        yield hub.url, hub.asked
