"""A stand-in for the wandb service on the loopback interface, with faults on demand.

It answers what the real client sends for a run (GraphQL and the file stream), and keeps it.
"""

import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ArrivedRun:
    """What the server was told about one run."""

    id: str
    created: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def config(self):
        items = json.loads(self.created["config"]).items()
        return {key: item["value"] for key, item in items if key != "_wandb"}

    def history(self):
        """The rows in the order of their offsets, without wandb's own `_` keys."""
        return [
            {key: value for key, value in self.rows[at].items() if not key.startswith("_")}
            for at in sorted(self.rows)
        ]


class LoopbackWandb:
    """A fault, an HTTP status or "hang" (never answer), hits paths that contain ``only``."""

    def __init__(self, fault=None, *, only=""):
        self.fault, self.only = fault, only
        self.runs: dict[str, ArrivedRun] = {}
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        self.views: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._http.block_on_close = False  # a thread of a closing client must not hold up a test
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self):
        """Stop listening and free every request that hangs; later connections are refused."""
        if self._thread.is_alive():
            self._released.set()
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def _fault_for(self, path):
        with self._lock:
            self.requests.append(path)
            return self.fault if self.only in path else None

    def _graphql(self, body):
        query, given = body.get("query", ""), body.get("variables") or {}
        if "RunResumeStatus" in query:
            return {"data": {"model": self._resume_status(given)}}
        if "upsertBucket" in query:
            run = self.runs.setdefault(given["name"], ArrivedRun(given["name"]))
            run.created.update({key: value for key, value in given.items() if value is not None})
            entity = {"name": given.get("entity") or "local"}
            bucket = {"id": f"bucket-{run.id}", "name": run.id}
            bucket["displayName"] = given.get("displayName") or run.id
            bucket["project"] = {"name": given.get("project") or "local", "entity": entity}
            return {"data": {"upsertBucket": {"inserted": True, "bucket": bucket}}}
        if "createRunFiles" in query:
            names = given.get("files") or []
            files = [{"name": n, "uploadUrl": f"{self.url}/upload/{n}"} for n in names]
            return {"data": {"createRunFiles": {"runID": "", "uploadHeaders": [], "files": files}}}
        if "mutation UpsertView2(" in query:  # a saved workspace
            self.views.append(given)
            view = {"id": "view-1", "name": given["name"]}
            return {"data": {"upsertView": {"view": view, "inserted": True}}}
        if "viewer" in query:
            return {"data": {"viewer": {"id": "1", "entity": "local", "username": "local"}}}
        return {"data": {}}

    def _resume_status(self, given):
        """What a client that resumes asks: how much of the run has arrived."""
        run = self.runs.get(given["name"])
        if run is None:
            return None
        tail = [json.dumps(run.rows[max(run.rows)])] if run.rows else []
        bucket = {"id": f"bucket-{run.id}", "name": run.id, "tags": run.created.get("tags") or []}
        bucket |= {"displayName": run.created.get("displayName"), "eventsTail": "[]"}
        bucket |= {"config": run.created.get("config") or "{}", "historyTail": json.dumps(tail)}
        bucket |= {"wandbConfig": json.dumps({"t": 1})}  # it was started
        bucket |= {"historyLineCount": len(run.rows), "logLineCount": 0, "eventsLineCount": 0}
        bucket |= {"summaryMetrics": json.dumps(run.summary)}
        entity = {"id": "1", "name": "local"}
        project = given.get("project") or "local"
        return {"id": "project", "name": project, "entity": entity, "bucket": bucket}

    def _file_stream(self, path, body):
        run_id = path.rstrip("/").split("/")[-2]
        run = self.runs.setdefault(run_id, ArrivedRun(run_id))
        for name, part in (body.get("files") or {}).items():
            lines = [json.loads(line) for line in part["content"]] if ".json" in name else []
            if name == "wandb-history.jsonl":
                run.rows.update(enumerate(lines, start=part["offset"]))
            elif name == "wandb-summary.json" and lines:
                run.summary = lines[-1]
        if body.get("complete"):
            run.exit_code = body.get("exitcode")
        return {"exitcode": None, "limits": {}}

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 120

            def log_message(self, format, *args):
                """Keep quiet."""

            def _answer(self, status, content):
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _serve(self):
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = server._fault_for(self.path)
                if fault == "hang":
                    server._released.wait(120)
                    self.close_connection = True
                    return
                if isinstance(fault, int):
                    self._answer(fault, {"errors": [{"message": "refused by the stand-in"}]})
                    return
                if self.headers.get("Content-Encoding") == "gzip":
                    raw = gzip.decompress(raw)
                with server._lock:
                    server.bodies.append(raw)
                    if self.path.startswith("/graphql"):
                        content = server._graphql(json.loads(raw))
                    elif self.path.endswith("file_stream"):
                        content = server._file_stream(self.path, json.loads(raw))
                    else:
                        content = {}
                self._answer(200, content)

            def handle(self):
                try:
                    super().handle()
                except OSError:
                    """The client went away; that is its right."""

            do_GET = do_POST = do_PUT = _serve  # the names http.server looks for

        return Handler
