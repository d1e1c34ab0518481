"""The official openai client against a server: openai_client.py ADDRESS; prints what it got as JSON.

Runs in a Python that has openai, and need not have distgpt.
"""

import json
import sys

import openai


def trouble(act):
    """Which of the client's errors comes, and what it says."""
    try:
        act()
    except openai.APIError as error:
        return [type(error).__name__, getattr(error, "status_code", None), error.code, str(error)]
    return None


def cancelled(client):
    """A stream that is left after three pieces."""
    stream = client.completions.create(
        model="sample", prompt="The harbour", max_tokens=2000, stream=True, extra_body={"overflow": "shift"}
    )
    pieces = [next(iter(stream)).choices[0].text for _ in range(3)]
    stream.close()
    return len(pieces)


def chatted(client):
    """A chat whole, in a stream, in several answers with log-probabilities, and what is refused."""
    messages = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "The harbour"}]
    create, same = client.chat.completions.create, {"model": "sample", "messages": messages, "temperature": 0}
    whole = create(**same, max_completion_tokens=8)
    *parts, last = create(**same, max_tokens=8, stream=True, stream_options={"include_usage": True})
    likely = create(**same, max_tokens=4, n=2, logprobs=True, top_logprobs=3, stop=["zz"], seed=1)
    return {
        "text": whole.choices[0].message.content,
        "role": whole.choices[0].message.role,
        "object": whole.object,
        "usage": whole.usage.total_tokens,
        "streamed": "".join(part.choices[0].delta.content or "" for part in parts),
        "reason": parts[-1].choices[0].finish_reason,
        "streamed_usage": last.usage.total_tokens,
        "several": [choice.message.content for choice in likely.choices],
        "tokens": [each.token for each in likely.choices[0].logprobs.content],
        "top": [len(each.top_logprobs) for each in likely.choices[0].logprobs.content],
        "wrong": trouble(lambda: create(**{**same, "messages": [{"role": "robot", "content": "a"}]})),
    }


def main():
    client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="s3cret", max_retries=0)
    create, same = client.completions.create, {"model": "sample", "prompt": "The harbour", "temperature": 0}
    several = create(**same, max_tokens=8, n=2, stop=["."], seed=3)
    likely = create(**same, max_tokens=6, logprobs=3).choices[0].logprobs
    scored = create(**same, max_tokens=0, echo=True, logprobs=1).choices[0]
    options = {"include_usage": True}
    *parts, last = create(**same, max_tokens=8, stream=True, stream_options=options)
    stranger = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="wrong", max_retries=0)
    found = {
        "models": [model.id for model in client.models.list()],
        "texts": [choice.text for choice in several.choices],
        "usage": several.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}),
        "tokens": likely.tokens,
        "top": likely.top_logprobs,
        "offsets": likely.text_offset,
        "scored": scored.logprobs.token_logprobs,
        "echoed": scored.text,
        "streamed": "".join(part.choices[0].text for part in parts),
        "reason": parts[-1].choices[0].finish_reason,
        "streamed_usage": last.usage.total_tokens,
        "extras": create(**same, max_tokens=4, extra_body={"top_k": 1, "min_p": 0.1}).choices[0].text,
        "batch": [choice.text for choice in create(**{**same, "prompt": ["A lamp", "The harbour"]}).choices],
        "chat": chatted(client),
        "wrong_key": trouble(lambda: stranger.completions.create(**same)),
        "wrong_model": trouble(lambda: create(**{**same, "model": "other"})),
        "wrong_value": trouble(lambda: create(**{**same, "temperature": -1})),
        "cancelled": cancelled(client),
    }
    print(json.dumps(found))


main()
