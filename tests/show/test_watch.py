"""The page of `distgpt watch`: reading growing files, the content of the page, and access to it."""

import errno
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from browser import BROWSER, CONTRAST, browser
from distgpt.core.base.errors import UsageError
from distgpt.core.saved.run_lock import RunLock
from distgpt.show import watch
from distgpt.show.watch import POINTS, Watch, Watched, ago, listen

from conftest import inside, popen, refused, train, wait_for

HOSTILE = '</pre></main><script>alert("1")</script><img src=x onerror=alert(2)>\x1b[31m\u202e'


def line(step, **more):
    usual = {"loss": 2 + 4 / step, "grad_norm": 1.0, "tokens_per_s": 320.0, "step_s": 0.1, "time": 1e9 + step}
    usual["train_bits_per_byte"] = 1 + 2 / step
    return json.dumps({"step": step, **usual, **more}) + "\n"


def evaluation(step, loss):
    return json.dumps({"step": step, "val_loss": loss, "val_tokens": 9}) + "\n"


def run(folder, steps, tokenizer="{}"):
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[train]\nsteps = 1000\n")
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "metrics.jsonl").write_text("".join(map(line, steps)))
    return folder


def append(folder, *lines, to="metrics.jsonl"):
    with (folder / to).open("a") as file:
        file.write("".join(lines))


@pytest.fixture
def no_wait(monkeypatch):
    """Refresh at every request, however long it takes."""
    monkeypatch.setattr(watch, "SHARE", 0)


def refreshed(seen):
    seen.refresh("run")
    return seen


def steps_of(seen):
    return seen.curves()["loss"].steps.tolist()


def row(body, name):
    """The cells of a run's row, by column."""
    cells = next(each for each in re.findall(r"<tr><td>.*", body) if f"</svg>{name}<td" in each)
    return dict(re.findall(r'<td data-name="([^"]+)">([^<]*)', cells))


@contextmanager
def served(*paths):
    with listen(Watch(paths, 0.0), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


# Growing files


def test_only_new_bytes_are_read(tmp_path, monkeypatch):
    folder, taken = run(tmp_path / "run", range(1, 2001)), []
    opened = watch.open_regular

    class Counted:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *ended):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def read(self, n):
            taken.append(len(found := self.file.read(n)))
            return found

        def readline(self, n):
            taken.append(len(found := self.file.readline(n)))
            return found

    monkeypatch.setattr(watch, "open_regular", lambda path: Counted(opened(path)))
    seen = refreshed(Watched(folder))
    assert sum(taken) == (folder / "metrics.jsonl").stat().st_size > 100_000
    taken.clear()
    append(folder, line(2001), line(2002))
    refreshed(seen)
    assert 0 < sum(taken) < 1000 and seen.listed.step == 2002


def test_an_incomplete_line_waits_for_its_end(tmp_path):
    seen = refreshed(Watched(folder := run(tmp_path / "run", [1, 2])))
    append(folder, line(3)[:20])
    assert refreshed(seen).listed.step == 2 and seen.listed.error is None
    append(folder, line(3)[20:])
    assert refreshed(seen).listed.step == 3 and steps_of(seen) == [1, 2, 3]


def test_a_resumed_run_shows_its_new_steps(tmp_path):
    seen = refreshed(Watched(folder := run(tmp_path / "run", range(1, 10))))
    # Rewritten up to the checkpoint, then longer than before.
    (folder / "new").write_text("".join(map(line, range(1, 5))) + "".join(line(n, time=2e9) for n in range(5, 30)))
    (folder / "new").replace(folder / "metrics.jsonl")
    assert steps_of(refreshed(seen)) == [*range(1, 30)] and seen.listed.step == 29
    # Steps repeated in the same file replace the former ones.
    append(folder, evaluation(12, 0.5), evaluation(29, 1.0), line(12, loss=0.5), evaluation(12, 3.0))
    assert steps_of(refreshed(seen)) == [*range(1, 13)]
    assert seen.curves()["loss"].values[-1] == 0.5
    assert [known["step"] for known in seen.evaluations] == [12] and seen.listed.val_loss == 3.0


@pytest.mark.parametrize("content", ["", "".join(map(line, [1, 2]))])
def test_a_truncated_file_is_read_again(tmp_path, content):
    seen = refreshed(Watched(folder := run(tmp_path / "run", range(1, 50))))
    (folder / "metrics.jsonl").write_text(content)
    assert steps_of(refreshed(seen)) == [1, 2][: content.count("\n")]
    append(folder, line(3))
    assert refreshed(seen).listed.step == 3


def test_a_corrupt_line_is_named_and_passed(tmp_path):
    seen = refreshed(Watched(folder := run(tmp_path / "run", [1])))
    append(folder, '{"step": "x"}\n', line(2))
    assert "line 2 is not a line of metrics" in refreshed(seen).listed.error
    assert refreshed(seen).listed.error is None and steps_of(seen) == [1, 2]


def test_a_failing_disk_keeps_the_last_numbers(tmp_path, monkeypatch, no_wait):
    page = Watch([folder := run(tmp_path / "run", [1, 2, 3])], 0.0)

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(watch, "open_regular", stale)
        body = page.body()
    found = row(body, "run")
    assert (found["state"], found["step"], found["loss"]) == ("unreadable", "3/1,000", f"{2 + 4 / 3:.4f}")
    assert "Stale file handle" in body and "<path" in body.partition("<figure>")[2] and page.is_live
    append(folder, line(4))
    assert row(page.body(), "run")["step"] == "4/1,000"


def test_a_deleted_run_stays_with_its_last_numbers(tmp_path, no_wait):
    page = Watch([run(tmp_path / "a", [1, 2]), run(tmp_path / "b", [1])], 0.0)
    for path in sorted((tmp_path / "a").iterdir()):
        path.unlink()
    (tmp_path / "a").rmdir()
    body = page.body()
    assert row(body, "a")["state"] == "deleted" and row(body, "a")["step"] == "2/1,000"
    assert row(body, "b")["state"] == "stopped" and not page.is_live


@pytest.mark.ci
@pytest.mark.timing
def test_100_000_steps_are_few_points_soon(tmp_path):
    folder = run(tmp_path / "run", [])
    odd = {50_000: {"grad_norm": None}, 70_001: {"grad_norm": 50.0}}
    append(folder, *(line(n, **odd.get(n, {})) for n in range(1, 100_001)))
    begun = time.process_time()
    seen = refreshed(Watched(folder))
    taken = time.process_time() - begun
    found, spikes = seen.curves()["grad_norm"], seen.curves()["grad_norm high"]
    assert POINTS / 2 < len(found.steps) <= POINTS and spikes.values.max() == 50.0
    assert 1.0 == found.values.min() < found.values.max() < 1.5  # NaN would fail
    assert found.steps[0] < 300 and found.steps[-1] > 99_700
    append(folder, line(100_001))
    begun = time.process_time()
    body = watch.render([refreshed(seen)])
    assert time.process_time() - begun < 0.2 * taken and len(body) < 100_000


def test_a_page_takes_a_fraction_of_the_time(tmp_path, monkeypatch):
    page = Watch([folder := run(tmp_path / "run", [1])], 0.0)
    monkeypatch.setattr(watch, "SHARE", 1e9)
    page.body()
    append(folder, line(2))
    assert row(page.body(), "run")["step"] == "1/1,000"


# The page


def test_runs_are_overlaid_and_new_ones_join(tmp_path, no_wait):
    run(tmp_path / "runs" / "a", [1, 2, 3])
    append(tmp_path / "runs" / "a", evaluation(2, 4.0), evaluation(3, 4.5))
    run(tmp_path / "runs" / "b", [1, 2])
    page = Watch([tmp_path / "runs"], 0.0)
    body = page.body()
    assert "<h1>2 runs</h1>" in body
    assert (row(body, "a")["validation"], row(body, "a")["best"]) == ("4.5000", "4.0000")
    loss, speed, norm = body.split("<figure>")[1:]
    colors = [set(re.findall('color="(#[^"]+)"', part)) for part in (loss, speed, norm.partition("</figure>")[0])]
    assert colors[0] == colors[1] == colors[2] and len(colors[0]) == 2
    assert "dots: validation" in loss and "nats per token" in loss
    run(tmp_path / "runs" / "c", [1], tokenizer="[]")  # another tokenizer: only bits per byte compare
    body = page.body()
    assert "<h1>3 runs</h1>" in body and row(body, "c")["step"] == "1/1,000" and "bits per byte" in body


def test_a_running_run_shows_state_and_remaining_time(tmp_path, no_wait):
    folder = run(tmp_path / "run", range(1, 101))
    page, lock = Watch([folder], 0.0), RunLock(folder)
    lock.claim()
    try:
        body = page.body()
        assert row(body, "run")["state"] == "running" and row(body, "run")["time left"] == "1:30"
        assert row(body, "run")["last step"].endswith(("second ago", "seconds ago")) and "wrong" not in body
        for name in ("config.toml", "metrics.jsonl"):
            os.utime(folder / name, (0, time.time() - 250))
        assert "run: running, but last step 4 minutes ago" in page.body()
    finally:
        lock.release()
    body = page.body()
    assert row(body, "run")["state"] == "stopped" and "time left" not in row(body, "run")
    assert row(body, "run")["last step"] == "4 minutes ago" and "wrong" not in body


def test_only_a_running_run_has_time_left(tmp_path, no_wait):
    folder = run(tmp_path / "run", [])
    (folder / "config.toml").write_text("[train]\ntrain_minutes = 10.0\n")
    append(folder, line(1, elapsed_s=60.0))
    page, lock = Watch([folder], 0.0), RunLock(folder)
    assert "time left" not in row(page.body(), "run")
    lock.claim()
    assert row(page.body(), "run")["time left"] == "9:00"
    lock.release()


@pytest.mark.parametrize("seconds, text", [(0.5, "0 seconds"), (1, "1 second"), (59, "59 seconds"), (7250, "2 hours")])
def test_an_age_is_in_its_largest_unit(seconds, text):
    assert ago(seconds) == f"{text} ago"


def test_the_newest_samples_are_shown_and_nothing_is_markup(tmp_path, no_wait):
    folder = run(tmp_path / "runs" / HOSTILE.replace("/", "&")[:40], [1, 2])
    page = Watch([folder], 0.0)
    for step in (1, 2, 3, 4, 2):  # the last one after a resume
        append(folder, json.dumps({"step": step, "sample": f"text {step} {HOSTILE}"}) + "\n", to="samples.jsonl")
    text = page.page()
    assert re.findall(r"<pre>text (\d)", text) == ["2", "1"]
    assert text.count("<script>") == text.count("</script>") == text.count("</main>") == 1
    assert "<img" not in text and "\x1b" not in text and "\u202e" not in text and "&lt;img src=x" in text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "lines",
    [
        [],
        [evaluation(0, 5.5)],
        [line(1, loss=None, grad_norm=0.0, tokens_per_s=None)],
        [line(1), line(2, loss=None, grad_norm=None), line(3, grad_norm=1e308, loss=2**63), evaluation(3, 1e308)],
    ],
)
def test_odd_numbers_make_a_page(tmp_path, lines):
    folder = run(tmp_path / "run", [])
    append(folder, *lines)
    body = Watch([folder], 0.0).body()
    assert "nan" not in body and "inf" not in body and body.count("<svg") == body.count("</svg>")
    assert all(path.startswith("M") and len(path) > 3 for path in re.findall(r'\bd="([^"]*)"', body))


# The server and the file


def test_the_server_has_one_page_for_this_host(tmp_path):
    with served(run(tmp_path / "run", [1, 2])) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, headers, text = ask(server)
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8" and "<h1>run</h1>" in text
        assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", text)
        status, _, body = ask(server, "/body")
        assert status == 200 and body.startswith("<header>") and "<script" not in body
        status, headers, body = ask(server, method="HEAD")
        assert (status, body) == (200, "") and int(headers["content-length"]) > 1000
        with socket.create_connection(server.server_address) as client:
            client.sendall(b"HEAD / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert b"".join(iter(lambda: client.recv(1 << 16), b"")).endswith(b"\r\n\r\n")
        for path in ("/metrics.jsonl", "/../run/config.toml", "/body/", "/?"):
            assert ask(server, path)[0] == 404
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1.evil.example", "localhost:x"):
            assert ask(server, host=host)[0] == 403
        assert ask(server, host="localhost:1")[0] == 200
        assert ask(server, method="POST")[0] == 501
        with pytest.raises(UsageError, match=f"--port {server.server_port}: Address already in use"):
            listen(Watch([tmp_path / "run"], 0.0), server.server_port)


def test_a_client_that_leaves_ends_nothing(tmp_path, capsys):
    with served(run(tmp_path / "run", [1])) as server:
        for request in (b"", b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", b"\0" * 99):
            with socket.create_connection(server.server_address) as client:
                client.sendall(request)
        assert ask(server)[0] == 200
    assert capsys.readouterr().err == ""


def test_a_file_of_runs_that_ended_has_no_script_and_is_written_once(tmp_path):
    run(tmp_path / "runs" / "a", [1, 2])
    result = inside("watch", "--html", "page.html", cwd=tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert (result.returncode, result.stderr) == (0, "")
    assert "<title>a · distgpt watch</title>" in text and "<h1>a</h1>" in text
    assert "<script" not in text and "http-equiv" not in text and "does not answer" not in text


def test_a_file_is_written_until_the_run_ends(tmp_path, monkeypatch):
    folder, out = run(tmp_path / "run", [1]), tmp_path / "page.html"
    (lock := RunLock(folder)).claim()
    found, waits = [], iter([lambda: append(folder, line(2)), lambda: None, lock.release])

    def sleep(seconds):
        if seconds:
            found.append(out.read_text() if out.exists() else "")
            next(waits)()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(watch, "IN_FILE", 1e-9)
    monkeypatch.setattr(watch, "SHARE", 0)
    watch.write_page([folder], out)
    assert [row(text, "run")["step"] for text in found] == ["1/1,000", "2/1,000", "2/1,000"]
    assert all('<meta http-equiv="refresh" content="' in text for text in found)
    assert "http-equiv" not in out.read_text() and row(out.read_text(), "run")["state"] == "stopped"


def test_the_command_rejects_what_it_cannot_do(tmp_path):
    folder = run(tmp_path / "run", [1])
    refused(inside("watch", tmp_path / "none"), 2, "none is not a run directory and contains no runs")
    refused(inside("watch", folder, "--html", tmp_path / "page", "--open"), 2, "omit --port and --open")
    refused(inside("watch", folder, "--html", tmp_path / "none" / "page"), 74, "cannot write")
    refused(inside("watch", cwd=tmp_path), 2, "no directory runs")


@pytest.mark.ci
@pytest.mark.smoke
def test_samples_of_a_run_reach_the_page_until_ctrl_c(tmp_path):
    folder = train(tmp_path / "run", "--steps", "4", "--sample-every", "2")
    samples = [json.loads(each) for each in (folder / "samples.jsonl").read_text().splitlines()]
    assert [each["step"] for each in samples] == [2, 4]
    with (tmp_path / "log").open("wb") as out:
        process = popen("watch", folder, stdout=out, stderr=out)
    log = tmp_path / "log"
    port = wait_for(lambda: re.match(r"http://127.0.0.1:(\d+)\n", log.read_text()), 60)[1]
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", "/")
    text = connection.getresponse().read().decode()
    assert text.count("<pre>") == 2 and "Sample of run after step 4" in text
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0 and log.read_text().count("\n") == 1


# In a real browser


MEASURED = """(() => {
  %s
  const found = {page: root.scrollWidth, contrasts: [], dark: matchMedia('(prefers-color-scheme: dark)').matches};
  for (const node of document.querySelectorAll('h1, h2, p, th, td, figcaption, pre')) {
    if (!node.getClientRects().length) continue;
    found.contrasts.push([contrast(colour(getComputedStyle(node).color), behind(node)), node.innerText]);
  }
  for (const node of document.querySelectorAll('text'))
    found.contrasts.push([contrast(colour(getComputedStyle(node).fill), behind(node)), node.textContent]);
  return found;
})()"""
STEP = "document.querySelector('td[data-name=step]').innerText"


@pytest.mark.ci
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_a_browser_shows_new_steps_at_any_width_in_light_and_dark(tmp_path, no_wait, monkeypatch):
    folder = run(tmp_path / "run", range(1, 101))
    append(folder, evaluation(100, 3.0))
    append(folder, json.dumps({"step": 100, "sample": "word " * 40 + "x" * 200 + HOSTILE}) + "\n", to="samples.jsonl")
    (lock := RunLock(folder)).claim()
    for name in ("config.toml", "metrics.jsonl"):
        os.utime(folder / name, (0, time.time() - 250))
    try:
        with served(folder) as server, browser(tmp_path) as page:
            for width, scheme in ((390, "dark"), (390, "light"), (1280, "dark"), (1280, "light")):
                page.window(width, 700, scheme)
                page.open(f"http://127.0.0.1:{server.server_port}/")
                seen = page.value(MEASURED % CONTRAST)
                assert seen["page"] <= width and seen["dark"] == (scheme == "dark") and len(seen["contrasts"]) > 30
                worst, text = min(seen["contrasts"])
                assert worst >= 4.5, text
                assert any("last step 4 minutes ago" in text for _, text in seen["contrasts"])
            assert page.value("document.querySelectorAll('.chart .line').length") == 3
            assert page.value("document.querySelector('.line').getBoundingClientRect().width") > 900
            page.value("scrollTo(0, 200)")
            append(folder, line(101))
            page.until(f"{STEP} === '101/1,000'")
            assert page.value("scrollY") == 200 and page.value("document.getElementById('lost').hidden")
            server.shutdown()
            server.server_close()
            page.until("!document.getElementById('lost').hidden")
            assert page.errors == []
    finally:
        lock.release()
