"""read_sinks.py READER DIR...: reads the files of a run with READER and compares them with its metrics.jsonl.

DIR is a log directory of nrl-train. Exits with an error where a number differs.
"""

import glob
import json
import math
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def rows_of(log_dir):
    with open(os.path.join(log_dir, "metrics.jsonl")) as file:
        rows = [json.loads(line) for line in file]
    losses = {r["step"]: r["loss"] for r in rows if "loss" in r}
    evaluations = {r["step"]: r["val_loss"] for r in rows if "val_loss" in r}
    with open(os.path.join(log_dir, "run.json")) as file:
        return losses, evaluations, json.load(file)["run_id"]


def same(name, found, expected, tolerance=0.0):
    missing, others = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    assert not missing and not others, f"{name}: steps {missing} are missing, {others} should not be there"
    for step, value in expected.items():
        assert math.isclose(found[step], value, rel_tol=tolerance, abs_tol=0), f"{name} of step {step}: {found[step]}"


def tensorboard(log_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    losses, evaluations, run_id = rows_of(log_dir)
    events = EventAccumulator(os.path.join(log_dir, "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = lambda tag: [(e.step, e.value) for e in events.Scalars(tag)]
    found = scalars("train/loss")
    assert len(found) == len(losses), "a step is there twice"
    same("train/loss", dict(found), losses, 1e-6)
    same("validation/val_loss", dict(scalars("validation/val_loss")), evaluations, 1e-6)
    assert events.Tensors("sample")[0].tensor_proto.string_val, "no text"
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.group_name == run_id
    assert start.hparams["policy.optimizer.lr"].number_value == 3e-3


def mlflow(log_dir):
    import mlflow

    losses, evaluations, run_id = rows_of(log_dir)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient("file://" + os.path.abspath(os.path.join(log_dir, "mlruns")))
    experiment = client.get_experiment_by_name("tiny")
    run = client.search_runs([experiment.experiment_id])[0]
    assert run.info.run_id == run_id
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "it's a \"run\""
    assert float(run.data.params["policy.optimizer.lr"]) == 3e-3
    history = lambda name: {m.step: m.value for m in client.get_metric_history(run_id, name)}
    assert len(client.get_metric_history(run_id, "train/loss")) == len(losses)
    same("train/loss", history("train/loss"), losses)
    same("validation/val_loss", history("validation/val_loss"), evaluations)
    assert client.list_artifacts(run_id, "sample"), "no text"


class WandbServer(BaseHTTPRequestHandler):
    """Answers the requests of `wandb sync` and keeps the streamed history by step."""

    history, exit_codes, runs = {}, [], []

    def log_message(self, *_):
        pass

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self):
        self.body()
        self.answer({})

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        raw = self.body()
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            raw = gzip.decompress(raw)
        request = json.loads(raw or b"{}")
        if "file_stream" in self.path:
            files = request.get("files", {})
            for line in files.get("wandb-history.jsonl", {}).get("content", []):
                row = json.loads(line)
                self.history[row["_step"]] = row
            if request.get("complete"):
                self.exit_codes.append(request.get("exitcode"))
            return self.answer({})
        query = request.get("query", "")
        variables = request.get("variables", {})
        if "upsertBucket" in query or "UpsertBucket" in query:
            self.runs.append(variables)
            project = {"name": variables.get("project") or "p", "entity": {"name": "e"}}
            bucket = {"id": "1", "name": variables.get("name"), "displayName": "d", "description": "", "config": "{}",
                      "sweepName": None, "project": project, "historyLineCount": 0}
            return self.answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}})
        if "CreateRunFiles" in query or "createRunFiles" in query:
            url = f"http://127.0.0.1:{self.server.server_port}/upload"
            files = [{"name": n, "uploadUrl": url} for n in variables.get("files", [])]
            created = {"runID": "1", "uploadHeaders": [], "files": files}
            return self.answer({"data": {"createRunFiles": created}})
        if "erverFeatures" in query:
            return self.answer({"data": {"serverInfo": {"features": []}}})
        return self.answer({"data": {"viewer": {"id": "1", "entity": "e", "flags": "{}", "teams": {"edges": []}},
                                     "serverInfo": {}, "model": None}})


def wandb(log_dir):
    losses, evaluations, run_id = rows_of(log_dir)
    server = ThreadingHTTPServer(("127.0.0.1", 0), WandbServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = dict(os.environ, WANDB_BASE_URL=f"http://127.0.0.1:{server.server_port}",
                       WANDB_API_KEY="0" * 40, WANDB_ERROR_REPORTING="false", HOME=os.path.abspath(log_dir))
    runs = sorted(glob.glob(os.path.join(log_dir, "wandb", f"offline-run-*-{run_id}")))
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *runs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    history = WandbServer.history
    same("train/loss", {s: r["train/loss"] for s, r in history.items() if "train/loss" in r}, losses)
    same("validation/val_loss",
         {s: r["validation/val_loss"] for s, r in history.items() if "validation/val_loss" in r}, evaluations)
    assert any("sample" in r for r in history.values()), "no text"
    assert {v.get("name") for v in WandbServer.runs if v.get("name")} == {run_id}, "another id"


if __name__ == "__main__":
    for directory in sys.argv[2:]:
        {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}[sys.argv[1]](directory)
