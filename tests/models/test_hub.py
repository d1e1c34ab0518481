import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from foreignmodels import SHAPES, exported_model, in_parts, same, tensors_in

from conftest import distgpt, refused

pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef" * 2 + "01234567"


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        with_body = self.command == "GET"
        name, files = self.path.split("?")[0].rsplit("/", 1)[1], self.server.folder
        if self.path.startswith("/api/models/some/model/tree/"):  # requested by newer versions
            sizes = [{"path": path.name, "size": path.stat().st_size} for path in sorted(files.iterdir())]
            self.send(200, json.dumps([{**x, "type": "file", "oid": "0" * 40} for x in sizes]).encode(), with_body)
        elif self.path.startswith("/api/models/some/model/"):
            about = {"id": "some/model", "sha": COMMIT}
            about["siblings"] = [{"rfilename": path.name} for path in sorted(files.iterdir())]
            self.send(200, json.dumps(about).encode(), with_body)
        elif self.path.startswith("/some/model/resolve/") and (files / name).is_file():
            self.send_file((files / name).read_bytes(), name, with_body)
        else:
            what = "Entry" if self.path.startswith("/some/model/") else "Repo"
            self.send(404, b"", with_body, {"X-Error-Code": f"{what}NotFound"})

    do_HEAD = do_GET

    def send_file(self, data, name, with_body):
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        tag = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        headers |= {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        cut = None
        if with_body:
            self.server.asked.append((name, begin))
            cut = self.server.cut.pop(name, None)
        if name in self.server.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.send(206 if begin else 200, data[begin:], with_body, headers, cut)

    def send(self, code, body, with_body, headers=None, cut=None):
        self.send_response(code)
        for key, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if with_body:
            self.wfile.write(body[:cut])
        self.close_connection = cut is not None

    def log_message(self, *words):
        pass


@pytest.fixture
def hub(tmp_path):
    """Serve a Qwen 3 in parts as some/model; `env` configures the hub's package for this server."""
    exported_model(tmp_path / "theirs", {**SHAPES["qwen 3"], "vocab_size": 150_000})
    in_parts(tmp_path / "theirs")
    (tmp_path / "theirs" / "pytorch_model.bin").write_bytes(b"a pickle")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.asked, server.damaged, server.cut = tmp_path / "theirs", [], set(), {}
    server.env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache")}
    server.env["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def imported(hub, out, name="hub:some/model"):
    return distgpt("weights", "import", name, "--out", out, env=hub.env)


@pytest.mark.ci
def test_interrupted_download_resumes(hub, tmp_path):
    part = max(hub.folder.iterdir(), key=lambda path: path.stat().st_size).name
    hub.cut[part] = 11 << 20  # the hub's package keeps whole pieces of 10 MB
    result = imported(hub, tmp_path / "back.safetensors")
    assert result.returncode == 0, result.stderr
    assert same(tensors_in(tmp_path / "back.safetensors"), tensors_in(tmp_path / "ours.safetensors"))
    begins = [begin for name, begin in hub.asked if name == part]
    assert begins[0] == 0 and 0 < begins[1] <= 11 << 20 and len(begins) == 2
    assert "pytorch_model.bin" not in [name for name, _ in hub.asked]
    hub.asked.clear()
    assert imported(hub, tmp_path / "again.safetensors").returncode == 0 and hub.asked == []


@pytest.mark.ci
def test_corrupt_download_is_fetched_again(hub, tmp_path):
    part = next(hub.folder.glob("model-00002*")).name
    hub.damaged.add(part)
    refused(imported(hub, tmp_path / "back.safetensors"), 65, part, "does not match the hub's checksum", "again")
    refused(imported(hub, tmp_path / "back.safetensors", "hub:some/other"), 65, "cannot download some/other")
    assert not list(tmp_path.glob("back*"))
    hub.damaged.clear()
    assert imported(hub, tmp_path / "back.safetensors").returncode == 0
    assert [name for name, _ in hub.asked].count(part) == 2


@pytest.mark.ci
def test_submit_fetches_tokenizer_before_queueing(hub, tmp_path):
    """A node without a network then has it in $HF_HOME."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text")
    words = ["submit", "--system", "slurm", "--time", "1h", "--", "train", "--data", "texts", "--tokenizer"]
    result = distgpt(*words, "hub:some/model", cwd=tmp_path, env=hub.env)
    assert result.returncode == 0 and "#SBATCH" in result.stdout, result.stderr
    away = {**hub.env, "HF_ENDPOINT": "http://127.0.0.1:1"}
    hub.asked.clear()
    for env in (hub.env, away):  # both use the cache
        there = distgpt("tokenizer", "info", "hub:some/model", cwd=tmp_path, env=env)
        assert there.returncode == 0 and hub.asked == [], there.stderr
    (hub.folder / "tokenizer.json").unlink()  # vocab.json and merges.txt are fetched instead
    other = {**hub.env, "HF_HOME": str(tmp_path / "other")}
    found = distgpt("tokenizer", "info", "hub:some/model", cwd=tmp_path, env=other)
    assert found.returncode == 0 and [name for name, _ in hub.asked] == ["merges.txt", "vocab.json"]
    gpt2 = distgpt(*words, "gpt2", cwd=tmp_path, env=away)
    refused(gpt2, 65, "cannot download the tokenizer of openai-community/gpt2", "pass --tokenizer a directory")
    assert gpt2.stdout == ""


FOUND = "from pathlib import Path; from distgpt.core.saved.weights import weights_of as of"
FOUND += "; print(of(Path('hub:some/model')))"


@pytest.mark.slow
def test_hub_names_are_fetched_once(hub, tmp_path):
    env = {**hub.env, "XDG_CACHE_HOME": str(tmp_path / "kept")}
    for _ in range(2):
        result = distgpt(program=[sys.executable, "-c", FOUND], env=env)
        kept = tmp_path / "kept" / "distgpt" / "models" / "some--model.safetensors"
        assert result.stdout.strip() == str(kept), result.stderr
        assert bool(hub.asked) == ("stored hub" in result.stderr)
        hub.asked.clear()
    assert same(tensors_in(kept), tensors_in(tmp_path / "ours.safetensors"))
    train = ["--init", "hub:some/model", "--data", "story"]
    for words in (
        ["estimate", *train, "--no-measure"],
        ["submit", "--system", "slurm", "--nodes", "1", "--time", "1h", "--", "train", *train],
    ):
        here = distgpt(*words, env={**hub.env, "XDG_CACHE_HOME": str(tmp_path / "empty")})
        refused(here, 2, "hub:some/model is not on this machine", "weights import")
        assert hub.asked == []
        there = distgpt(*words, env=env)
        assert there.returncode == 0, there.stderr
    for words in (["infer"], ["eval", "--val", "story"], ["tune", "--data", "x.jsonl"]):
        missing = distgpt(*words, "--weights", "hub:some/other", env=env)
        refused(missing, 65, "cannot download some/other", "without a network")
