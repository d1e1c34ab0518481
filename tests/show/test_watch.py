"""The page of `distgpt watch`: reading growing files, the content of the page, and access to it."""

import errno
import http.client
import json
import os
import re
import shutil
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


@pytest.fixture
def folder(tmp_path):
    return run(tmp_path / "run", range(1, 10))


def append(folder, *lines, to="metrics.jsonl"):
    with (folder / to).open("a") as file:
        file.write("".join(lines))


def age(folder):
    """Let the last step be 250 seconds ago."""
    for name in ("config.toml", "metrics.jsonl"):
        os.utime(folder / name, (0, time.time() - 250))


@contextmanager
def running(folder):
    (lock := RunLock(folder)).claim()
    try:
        yield
    finally:
        lock.release()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    """Refresh at every request, however long it takes."""
    monkeypatch.setattr(watch, "SHARE", 0)


def refreshed(seen):
    seen.refresh("run")
    return seen


def steps_of(seen):
    return seen.curves()["loss"].steps.tolist()


def row(body, name):
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


def ask(port, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


# Growing files


def test_only_new_bytes_are_read(folder):
    seen = refreshed(Watched(folder))
    with (folder / "metrics.jsonl").open("r+") as file:
        file.write("not read again")
    append(folder, line(10), line(11))
    assert steps_of(refreshed(seen)) == [*range(1, 12)] and seen.listed.step == 11 and seen.listed.error is None


NINE, TWO = ("".join(map(line, range(1, end))) for end in (10, 3))


@pytest.mark.parametrize("content, rest, last, error", [
    (NINE + line(10)[:20], line(10)[20:], 9, None),  # incomplete
    (NINE + '{"step": "x"}\n', line(10), 9, "line 10 is not a line of metrics"),
    (TWO, line(3), 2, None),
    ("", line(1), 0, None),
    (TWO + "".join(line(n, time=2e9) for n in range(3, 30)), line(30), 29, None),  # resumed, and longer than before
])  # fmt: skip
def test_changed_file_shows_its_steps(folder, content, rest, last, error):
    seen = refreshed(Watched(folder))
    (folder / "metrics.jsonl").write_text(content)
    assert steps_of(refreshed(seen)) == [*range(1, last + 1)]
    assert error in seen.listed.error if error else seen.listed.error is None
    append(folder, rest)
    assert steps_of(refreshed(seen)) == [*range(1, last + 2)]
    assert seen.listed.step == last + 1 and seen.listed.error is None


def test_repeated_steps_replace_the_former(folder):
    seen = refreshed(Watched(folder))
    append(folder, evaluation(4, 0.5), evaluation(9, 1.0), line(4, loss=0.5), evaluation(4, 3.0))
    assert steps_of(refreshed(seen)) == [1, 2, 3, 4] and seen.curves()["loss"].values[-1] == 0.5
    assert [known["step"] for known in seen.evaluations] == [4] and seen.listed.val_loss == 3.0


def test_a_lost_run_keeps_its_last_numbers(folder, tmp_path, monkeypatch):
    page = Watch([folder, run(tmp_path / "b", [1])], 0.0)

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(watch, "open_regular", stale)
        body = page.body()
    found = row(body, "run")
    assert (found["state"], found["step"], found["loss"]) == ("unreadable", "9/1,000", "2.4444")
    assert "Stale file handle" in body and "<path" in body.partition("<figure>")[2] and page.is_live
    append(folder, line(10))
    assert row(page.body(), "run")["step"] == "10/1,000"
    shutil.rmtree(folder)
    states = [(row(page.body(), name)["state"], row(page.body(), name)["step"]) for name in ("run", "b")]
    assert states == [("deleted", "10/1,000"), ("stopped", "1/1,000")] and not page.is_live


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
    assert POINTS / 2 < len(found.steps) <= POINTS and found.steps[0] < 300 and found.steps[-1] > 99_700
    assert 1.0 == found.values.min() < found.values.max() < 1.5 < spikes.values.max() == 50.0  # and no NaN
    append(folder, line(100_001))
    begun = time.process_time()
    body = watch.render([refreshed(seen)])
    assert time.process_time() - begun < 0.2 * taken and len(body) < 100_000


def test_a_page_takes_a_fraction_of_the_time(folder, monkeypatch):
    page = Watch([folder], 0.0)
    monkeypatch.setattr(watch, "SHARE", 1e9)
    page.body()
    append(folder, line(10))
    assert row(page.body(), "run")["step"] == "9/1,000"


# The page


def test_runs_are_overlaid_and_new_ones_join(tmp_path):
    append(run(tmp_path / "runs" / "a", [1, 2, 3]), evaluation(2, 4.0), evaluation(3, 4.5))
    run(tmp_path / "runs" / "b", [1, 2])
    page = Watch([tmp_path / "runs"], 0.0)
    body = page.body()
    assert "<h1>2 runs</h1>" in body
    assert (row(body, "a")["validation"], row(body, "a")["best"]) == ("4.5000", "4.0000")
    colors = [set(re.findall('color="(#[^"]+)"', part)) for part in re.findall("<figure>.*?</figure>", body)]
    assert colors == [colors[0]] * 3 and len(colors[0]) == 2 and "nats per token; dots: validation" in body
    run(tmp_path / "runs" / "c", [1], tokenizer="[]")  # another tokenizer: only bits per byte compare
    body = page.body()
    assert "<h1>3 runs</h1>" in body and row(body, "c")["step"] == "1/1,000" and "bits per byte" in body


@pytest.mark.parametrize("limit, more, left", [
    ("steps = 110", {}, "0:10"), ("train_minutes = 10.0", {"elapsed_s": 60.0}, "9:00")
])  # fmt: skip
def test_only_a_running_run_has_time_left(folder, limit, more, left):
    (folder / "config.toml").write_text(f"[train]\n{limit}\n")
    append(folder, line(9, **more))
    page = Watch([folder], 0.0)
    with running(folder):
        found = row(page.body(), "run")
        assert (found["state"], found["time left"]) == ("running", left)
        assert found["last step"].endswith(("second ago", "seconds ago")) and "wrong" not in page.body()
        age(folder)
        assert "run: running, but last step 4 minutes ago" in page.body()
    found = row(page.body(), "run")
    assert (found["state"], found["last step"]) == ("stopped", "4 minutes ago")
    assert "time left" not in found and "wrong" not in page.body()


def test_an_age_is_in_its_largest_unit():
    ages = {0.5: "0 seconds", 1: "1 second", 59: "59 seconds", 7250: "2 hours"}
    assert [ago(seconds) for seconds in ages] == [f"{text} ago" for text in ages.values()]


def test_the_newest_samples_are_shown_and_nothing_is_markup(tmp_path):
    folder = run(tmp_path / "runs" / HOSTILE.replace("/", "&")[:40], [1, 2])
    page = Watch([folder], 0.0)
    for step in (1, 2, 3, 4, 2):  # the last one after a resume
        append(folder, json.dumps({"step": step, "sample": f"text {step} {HOSTILE}"}) + "\n", to="samples.jsonl")
    text = page.page()
    assert re.findall(r"<pre>text (\d)", text) == ["2", "1"]
    assert text.count("<script>") == text.count("</script>") == text.count("</main>") == 1
    assert "<img" not in text and "\x1b" not in text and "\u202e" not in text and "&lt;img src=x" in text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lines", [
    [],
    [evaluation(0, 5.5)],
    [line(1, loss=None, grad_norm=0.0, tokens_per_s=None)],
    [line(1), line(2, loss=None, grad_norm=None), line(3, grad_norm=1e308, loss=2**63), evaluation(3, 1e308)],
])  # fmt: skip
def test_odd_numbers_make_a_page(tmp_path, lines):
    folder = run(tmp_path / "run", [])
    append(folder, *lines)
    body = Watch([folder], 0.0).body()
    assert "nan" not in body and "inf" not in body and body.count("<svg") == body.count("</svg>")
    assert all(path.startswith("M") and len(path) > 3 for path in re.findall(r'\bd="([^"]*)"', body))


# The server and the file


def test_the_server_has_one_page_for_this_host(folder, capsys):
    with served(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        port = server.server_port
        status, headers, text = ask(port)
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8" and "<h1>run</h1>" in text
        assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", text)
        body = ask(port, "/body")[2]
        assert body.startswith("<header>") and "<script" not in body
        status, headers, body = ask(port, method="HEAD")
        assert (status, body) == (200, "") and int(headers["content-length"]) > 1000
        for request in (b"", b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", b"\0" * 99):  # the client leaves
            with socket.create_connection(server.server_address) as client:
                client.sendall(request)
        with socket.create_connection(server.server_address) as client:
            client.sendall(b"HEAD / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert b"".join(iter(lambda: client.recv(1 << 16), b"")).endswith(b"\r\n\r\n")
        evil = ("evil.example", f"127.0.0.1.evil.example:{port}", "localhost:x")
        assert {ask(port, host=host)[0] for host in evil} == {403} and ask(port, host="localhost:1")[0] == 200
        assert {ask(port, path)[0] for path in ("/metrics.jsonl", "/../run/config.toml", "/body/", "/?")} == {404}
        assert ask(port, method="POST")[0] == 501
        with pytest.raises(UsageError, match=f"--port {port}: Address already in use"):
            listen(Watch([folder], 0.0), port)
    assert capsys.readouterr().err == ""


def test_a_file_of_runs_that_ended_has_no_script_and_is_written_once(tmp_path):
    run(tmp_path / "runs" / "a", [1, 2])
    result = inside("watch", "--html", "page.html", cwd=tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert (result.returncode, result.stderr) == (0, "") and "<title>a · distgpt watch</title>" in text
    assert not any(word in text for word in ("<script", "http-equiv", "does not answer"))


def test_a_file_is_written_until_the_run_ends(folder, tmp_path, monkeypatch):
    out, found = tmp_path / "page.html", []
    (lock := RunLock(folder)).claim()
    waits = iter([lambda: append(folder, line(10)), lambda: None, lock.release])

    def sleep(seconds):
        if seconds:
            found.append(out.read_text())
            next(waits)()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(watch, "IN_FILE", 1e-9)
    watch.write_page([folder], out)
    assert [row(text, "run")["step"] for text in found] == ["9/1,000", "10/1,000", "10/1,000"]
    assert all('<meta http-equiv="refresh" content="' in text for text in found)
    assert "http-equiv" not in out.read_text() and row(out.read_text(), "run")["state"] == "stopped"


def test_the_command_rejects_what_it_cannot_do(folder, tmp_path):
    refused(inside("watch", tmp_path / "none"), 2, "none is not a run directory and contains no runs")
    refused(inside("watch", folder, "--html", tmp_path / "page", "--open"), 2, "omit --port and --open")
    refused(inside("watch", folder, "--html", tmp_path / "none" / "page"), 74, "cannot write")
    refused(inside("watch", cwd=tmp_path), 2, "no directory runs")


@pytest.mark.ci
@pytest.mark.smoke
def test_samples_of_a_run_reach_the_page_until_ctrl_c(tmp_path):
    folder, log = train(tmp_path / "run", "--steps", "4", "--sample-every", "2"), tmp_path / "log"
    with log.open("wb") as out:
        process = popen("watch", folder, stdout=out, stderr=out)
    text = ask(int(wait_for(lambda: re.match(r"http://127.0.0.1:(\d+)\n", log.read_text()), 60)[1]))[2]
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
def test_a_browser_shows_new_steps_at_any_width_in_light_and_dark(folder, tmp_path):
    append(folder, *map(line, range(10, 101)), evaluation(100, 3.0))
    append(folder, json.dumps({"step": 100, "sample": "word " * 40 + "x" * 200 + HOSTILE}) + "\n", to="samples.jsonl")
    age(folder)
    with running(folder), served(folder) as server, browser(tmp_path) as page:
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
