"""A stand-in for the wandb service on the loopback interface, with faults on demand.

It answers what the real client sends for a run (GraphQL and the file stream), and keeps it.
"""

import gzip
import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ArrivedRun:
    """What the server was told about one run; rows by their offsets."""

    def __init__(self):
        self.created = {}
        self.rows = {}
        self.summary = {}
        self.exit_code = None

    def history(self):
        """The rows in the order of their offsets, without wandb's own `_` keys."""
        rows = (self.rows[offset] for offset in sorted(self.rows))
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]

    def resume_status(self, name):
        """What a client that resumes asks: how much of the run has arrived."""
        tail = [json.dumps(self.rows[max(self.rows)])] if self.rows else []
        bucket = {"id": name, "name": name, "tags": self.created.get("tags") or []}
        bucket |= {"displayName": self.created.get("displayName"), "eventsTail": "[]"}
        bucket |= {"config": self.created.get("config") or "{}", "historyTail": json.dumps(tail)}
        bucket |= {"wandbConfig": json.dumps({"t": 1})}  # it was started
        bucket |= {"historyLineCount": len(self.rows), "logLineCount": 0, "eventsLineCount": 0}
        bucket |= {"summaryMetrics": json.dumps(self.summary)}
        entity = {"id": "1", "name": "local"}
        return {"id": "1", "name": "local", "entity": entity, "bucket": bucket}


class LoopbackWandb:
    """A fault, an HTTP status or "hang" (never answer), hits paths that contain ``only``."""

    def __init__(self, fault=None, *, only=""):
        self.fault, self.only = fault, only
        self.runs = defaultdict(ArrivedRun)
        self.requests = []
        self.bodies = []
        self.views = []
        self.lock = threading.Lock()
        self.released = threading.Event()
        handler = type("Handler", (_Handler,), {"stand_in": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False  # a thread of a closing client must not hold up a test
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self):
        """Stop listening and free every request that hangs; later connections are refused."""
        if self._thread.is_alive():
            self.released.set()
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def answer(self, path, raw):
        self.bodies.append(raw)
        if path.startswith("/graphql"):
            body = json.loads(raw)
            return {"data": self._graphql(body.get("query", ""), body.get("variables") or {})}
        return self._file_stream(path, json.loads(raw)) if path.endswith("file_stream") else {}

    def _graphql(self, query, given):
        name = given.get("name")
        project = given.get("project") or "local"
        if "RunResumeStatus" in query:
            return {"model": self.runs[name].resume_status(name) if name in self.runs else None}
        if "upsertBucket" in query:
            self.runs[name].created |= {k: v for k, v in given.items() if v is not None}
            entity = {"name": given.get("entity") or "local"}
            bucket = {"id": name, "name": name, "displayName": given.get("displayName") or name}
            bucket["project"] = {"name": project, "entity": entity}
            return {"upsertBucket": {"inserted": True, "bucket": bucket}}
        if "createRunFiles" in query:
            names = given.get("files") or []
            files = [{"name": n, "uploadUrl": f"{self.url}/upload/{n}"} for n in names]
            return {"createRunFiles": {"runID": "", "uploadHeaders": [], "files": files}}
        if "mutation UpsertView2(" in query:  # a saved workspace
            self.views.append(given)
            return {"upsertView": {"view": {"id": "view-1", "name": name}, "inserted": True}}
        viewer = {"viewer": {"id": "1", "entity": "local", "username": "local"}}
        return viewer if "viewer" in query else {}

    def _file_stream(self, path, body):
        run = self.runs[path.rstrip("/").split("/")[-2]]
        for name, part in (body.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                run.rows |= enumerate(map(json.loads, part["content"]), start=part["offset"])
            elif name == "wandb-summary.json" and part["content"]:
                run.summary = json.loads(part["content"][-1])
        if body.get("complete"):
            run.exit_code = body.get("exitcode")
        return {"exitcode": None, "limits": {}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120

    def log_message(self, format, *args):
        """Keep quiet."""

    def _serve(self):
        server = self.stand_in
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with server.lock:
            server.requests.append(self.path)
            fault = server.fault if server.only in self.path else None
        if fault == "hang":
            server.released.wait(120)
            self.close_connection = True
            return
        if self.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        content = {"errors": [{"message": "refused by the stand-in"}]}
        with server.lock:
            content = content if fault else server.answer(self.path, raw)
        data = json.dumps(content).encode()
        self.send_response(fault or 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle(self):
        try:
            super().handle()
        except OSError:
            """The client went away; that is its right."""

    do_GET = do_POST = do_PUT = _serve  # the names http.server looks for
