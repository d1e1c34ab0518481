"""The playground and the chat page in a real browser."""

import json

import pytest
from browser import BROWSER, CONTRAST, browser
from serving import server

from conftest import wait_for

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
WINDOWS = [(360, "dark"), (1280, "light")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found
        assert found.errors == []  # neither exceptions nor policy violations


def text_of(page, name):
    return page.value(f"document.getElementById('{name}').textContent")


def set_to(page, **values):
    for name, value in values.items():
        page.value(f"document.getElementById('{name}').value = {value!r}")


def opened(page, found, width=1280, scheme="light"):
    page.window(width, 860, scheme)
    page.open(f"http://127.0.0.1:{found.port}/")
    page.until("document.getElementById('model').textContent.startsWith('sample')")


def generate(page, **settings):
    set_to(page, **settings)
    page.value("document.getElementById('prompt').focus()")
    page.key("Enter", 13, modifiers=2)


def test_page_generates_and_shows_alternatives(page):
    with server() as found:
        opened(page, found)
        generate(page, temperature=0, max_tokens=30, prompt="The harbour")
        page.until("document.getElementById('said').textContent.startsWith('30 tokens')")
        whole = found.complete("The harbour", temperature=0, max_tokens=30, logprobs=7)["choices"][0]
        assert text_of(page, "text") == "The harbour" + whole["text"]
        assert "30 tokens in" in text_of(page, "speed") and "tokens/s" in text_of(page, "speed")
        page.value("document.getElementById('text').focus()")
        for key, code, place in (("ArrowLeft", 37, 29), ("Home", 36, 0), ("ArrowRight", 39, 1), ("End", 35, 29)):
            page.key(key, code)
            assert text_of(page, "place") == f"Alternatives to token {place + 1} of 30"
            top = sorted(whole["logprobs"]["top_logprobs"][place].items(), key=lambda each: -each[1])
            names = page.value("[...document.querySelectorAll('#rows td:first-child')].map(n => n.innerText)")
            assert names == [name.replace(" ", "␣").replace("\n", "↵") for name, _ in top]
            chosen = page.value("document.querySelector('tr.chosen td').innerText")
            assert chosen == names[0] and chosen in text_of(page, "said")
        token = "document.querySelectorAll('.token')[4].getBoundingClientRect()"
        box = page.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({token})")
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        page.until("document.getElementById('place').textContent === 'Alternatives to token 5 of 30'")
        page.value("document.getElementById('more').click()")
        page.until("document.getElementById('said').textContent.startsWith('30 tokens')")
        page.until("!document.getElementById('more').disabled")
        assert page.value("document.getElementById('prompt').value") == "The harbour" + whole["text"]


def test_stop_button_frees_slot(page):
    with server(seconds=0.02) as found:
        opened(page, found)
        for stop in ("document.getElementById('stop').click()", None):
            generate(page, max_tokens=2000, prompt="The harbour")
            page.until("document.querySelectorAll('.token').length > 2")
            assert not found.is_free
            page.value(stop) if stop else page.key("Escape", 27)
            wait_for(lambda: found.is_free)
            page.until("document.getElementById('said').textContent.startsWith('stopped after')")
            page.until("!document.getElementById('go').disabled")
        assert found.counted("cancelled") == 2


def test_page_shows_errors(page):
    with server(key="s3cret") as found:
        page.window(1280, 860, "light")
        page.open(f"http://127.0.0.1:{found.port}/")
        page.until("document.getElementById('wrong').textContent.includes('no API key')")
        set_to(page, key="s3cret")
        page.value("document.getElementById('key').dispatchEvent(new Event('change'))")
        page.until("document.getElementById('model').textContent.startsWith('sample')")
        assert text_of(page, "wrong") == ""
        generate(page, max_tokens=5, prompt="")
        page.until("document.getElementById('wrong').textContent.includes('prompt is empty')")
        generate(page, max_tokens=5, prompt="a")
        page.until("document.getElementById('said').textContent.startsWith('5 tokens')")
        assert text_of(page, "wrong") == ""
        found.slots.seconds, found.slots.spoil = 0.01, 1
        generate(page, max_tokens=50, prompt="a")
        page.until("document.getElementById('wrong').textContent.includes('not finite')")


def test_page_escapes_generated_text(page):
    with server() as found:
        opened(page, found)
        generate(page, max_tokens=5, prompt="<img src=x onerror=alert(1)><b>")
        page.until("document.getElementById('said').textContent.startsWith('5 tokens')")
        assert page.value("document.querySelectorAll('#text img, #text b').length") == 0


MEASURED = """(() => {
  %s
  const found = {page: root.scrollWidth, contrasts: [], unnamed: [], small: []};
  found.dark = matchMedia('(prefers-color-scheme: dark)').matches;
  const readable = 'h1, h2, p, label, legend, button, td, th, span, kbd, input, textarea';
  for (const node of document.querySelectorAll(readable)) {
    const text = (node.innerText || node.value || '').trim();
    if (!node.getClientRects().length || node.disabled || !text || node.closest('.hidden')) continue;
    found.contrasts.push([contrast(colour(getComputedStyle(node).color), behind(node)), text]);
  }
  for (const node of document.querySelectorAll('input, textarea, select, button')) {
    if (!node.getClientRects().length) continue;
    if (!node.labels?.length && !node.innerText && !node.ariaLabel) found.unnamed.push(node.id);
    if (node.getBoundingClientRect().height < 24) found.small.push(node.id);
  }
  return found;
})()"""


def fits(page, width, scheme, texts):
    seen = page.value(MEASURED % CONTRAST)
    assert seen["dark"] == (scheme == "dark") and seen["page"] <= width
    assert len(seen["contrasts"]) > texts and not seen["unnamed"] and not seen["small"]
    worst, told = min(seen["contrasts"])
    assert worst >= 4.5, told


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_page_fits_and_is_readable(page, width, scheme):
    with server() as found:
        opened(page, found, width, scheme)
        generate(page, max_tokens=90, prompt="The harbour " + "x" * 60)
        page.until("document.getElementById('said').textContent.startsWith('90 tokens')")
        page.value("document.getElementById('text').focus()")
        page.key("End", 35)
        fits(page, width, scheme, 100)


TURNS = "[...document.querySelectorAll('.turn')].map(node => node.innerText)"
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def said_to(page, text, **values):
    set_to(page, message=text, **values)
    page.value("document.getElementById('message').focus()")
    page.key("Enter", 13)


def answered(page):
    page.until("running === null")
    assert text_of(page, "trouble") == ""
    return page.value(TURNS)


def test_chat_continues_and_is_restored(page):
    with server(template=TEMPLATE) as found:
        opened(page, found)
        assert text_of(page, "title") == "distgpt chat" and page.value(TURNS) == []
        said_to(page, "The harbour", temperature=0, max_tokens=12)
        turns = answered(page)
        messages = [{"role": "user", "content": "The harbour"}]
        first = answer(found, messages)
        assert turns == ["The harbour", first.strip()] and "to the first" in text_of(page, "pace")
        said_to(page, "<b>And</b>?", system="Brief.")
        messages = [{"role": "system", "content": "Brief."}, *messages]
        messages.append({"role": "assistant", "content": first})
        second = answer(found, [*messages, {"role": "user", "content": "<b>And</b>?"}])
        whole = [*turns, "<b>And</b>?", second.strip()]
        assert answered(page) == whole
        page.value("document.getElementById('again').click()")
        assert answered(page) == whole
        page.value("document.getElementById('fresh').click()")
        assert page.value(TURNS) == []
        opened(page, found)  # reopened
        page.value(CHOOSE % "'The harbour'")
        assert page.value(TURNS) == whole
        page.value(CHOOSE % "'Forget all of them'")
        assert page.value(TURNS) == [] and page.value("localStorage.getItem('distgpt.chats')") == "[]"


def answer(found, messages, **more):
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **more}
    return found.ask("/v1/chat/completions", body)[2]["choices"][0]["message"]["content"]


CHOOSE = """(() => {
  const box = document.getElementById('earlier');
  box.value = [...box.options].find(each => each.text === %s).value;
  box.dispatchEvent(new Event('change'));
})()"""


def test_chat_can_be_stopped_and_trimmed(page):
    with server(template=TEMPLATE) as found:
        opened(page, found)
        found.slots.seconds = 0.02
        said_to(page, "x" * 60, temperature=0)
        page.until(f"({TURNS})[1]?.length > 2")
        page.key("Escape", 27)
        first = answered(page)
        assert len(first) == 2 and len(first[1]) < 60 and text_of(page, "pace").endswith("tokens/s; stopped")
        wait_for(lambda: found.is_free)
        found.slots.seconds = 0.0
        said_to(page, "y" * 70, max_tokens=5)
        assert len(answered(page)) == 4 and "oldest turns" in text_of(page, "pace")
        said_to(page, "z" * 200)
        page.until("document.getElementById('trouble').textContent.includes('context of 128')")
        assert len(page.value(TURNS)) == 4 and page.value("document.getElementById('message').value") == "z" * 200


ANSWER = """# Fares
Take **the *early* one**, `ls **`, not a_b_c or __init__
or 2 * 3 * 4.

3. one
4. two
   - _below_ ***it***

```python
x = "**not bold**"

```
<img src=x onerror="hit = 1"> [**x**](javascript:hit=1) **<script>hit = 1</script>**
```
</code><b onclick="hit = 1">"""
SHOWN = (
    "<h3>Fares</h3>"
    "<p>Take <strong>the <em>early</em> one</strong>, <code>ls **</code>, not a_b_c or __init__\nor 2 * 3 * 4.</p>"
    '<ol><li value="3" style="margin-left: 0em;">one</li><li value="4" style="margin-left: 0em;">two</li></ol>'
    '<ul><li style="margin-left: 1.5em;"><em>below</em> <strong><em>it</em></strong></li></ul>'
    '<pre><code>x = "**not bold**"\n</code></pre>'
    '<p>&lt;img src=x onerror="hit = 1"&gt; [<strong>x</strong>](javascript:hit=1) '
    "<strong>&lt;script&gt;hit = 1&lt;/script&gt;</strong></p>"
    '<pre><code>&lt;/code&gt;&lt;b onclick="hit = 1"&gt;</code></pre>'
)
REPLY = """fetch = async () => new Response(%s.map(text =>
  "data: " + JSON.stringify({choices: [{delta: {content: text}}]}) + "\\n\\n").join("") + "data: [DONE]\\n\\n")"""


def test_answer_renders_markdown_and_copies(page):
    with server(template=TEMPLATE) as found:
        opened(page, found)
        page.value("hit = 0")
        page.value(REPLY % json.dumps(list(ANSWER)))
        said_to(page, "**Hi**")
        assert answered(page)[0] == "**Hi**"
        assert page.value("document.querySelector('.assistant').innerHTML") == SHOWN
        page.value("navigator.clipboard.writeText = async text => { copied = text }")
        page.value("document.getElementById('copy').click()")
        page.until("document.getElementById('copy').textContent === 'Copied'")
        assert page.value("copied") == ANSWER
        page.value("open(chats[0])")  # as if chosen from the list
        assert page.value("document.querySelector('.assistant').innerHTML") == SHOWN
        assert page.value("hit") == 0 and text_of(page, "copy") == "Copy"
        page.value("deep = blocks('*'.repeat(9000) + '\\n' + ' '.repeat(9000) + '- a')")
        assert page.value("deep.map(node => node.querySelectorAll('*').length)") == [0, 1]


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_chat_fits_and_is_readable(page, width, scheme):
    with server(template=TEMPLATE) as found:
        opened(page, found, width, scheme)
        for _ in range(3):
            said_to(page, "The harbour " + "x" * 50, max_tokens=20)
            answered(page)
        if width < 600:
            page.value("document.getElementById('toggle').click()")
        fits(page, width, scheme, 10)
        bottom = page.value("document.getElementById('ask').getBoundingClientRect().bottom")
        assert bottom <= 860 >= page.value("document.documentElement.scrollHeight")


def test_tab_key_follows_page_order(page):
    with server() as found:
        opened(page, found)
        generate(page, max_tokens=3, prompt="a")
        page.until("document.getElementById('said').textContent.startsWith('3 tokens')")
        page.value("document.querySelector('.skip').focus()")
        order = []
        for _ in range(15):
            order.append(page.value("document.activeElement.id"))
            page.key("Tab", 9)
        page.value("document.getElementById('max_tokens').value = 2000")
        page.value("document.getElementById('go').focus()")
        found.slots.seconds = 0.02
        page.key("Enter", 13)
        page.until("document.querySelectorAll('.token').length > 5")
        assert page.value("document.activeElement.id") == "stop"
        page.key("Enter", 13)
        page.until("document.activeElement.id === 'text'")
        assert order[1:8] == ["prompt", "go", "more", "text", "max_tokens", "temperature", "top_p"]
