"""Call a server with the official openai client: openai_client.py ADDRESS REQUESTS; prints the answers as JSON.

A request is "completions" or "chat", and a body. Runs in a Python that has openai; distgpt is not needed.
"""

import json
import sys

import openai


def answer(client, kind, body):
    create = client.completions.create if kind == "completions" else client.chat.completions.create
    own = {name: body.pop(name) for name in ("overflow", "top_k", "min_p") if name in body}
    try:
        found = create(model=body.pop("model", "sample"), **body, extra_body=own)
        return [part.model_dump() for part in found] if body.get("stream") else found.model_dump()
    except openai.APIError as error:
        return [type(error).__name__, getattr(error, "status_code", None), error.code]


def main():
    how = {"base_url": f"{sys.argv[1]}/v1", "max_retries": 0}
    client, stranger = (openai.OpenAI(api_key=key, **how) for key in ("s3cret", "wrong"))
    found = [answer(client, *asked) for asked in json.loads(sys.argv[2])]
    more = {"max_tokens": 2000, "stream": True, "extra_body": {"overflow": "shift"}}
    left = client.completions.create(model="sample", prompt="a", **more)
    next(iter(left))
    left.close()
    wrong_key = answer(stranger, "completions", {"prompt": "a"})
    print(json.dumps({"found": found, "wrong_key": wrong_key, "models": [model.id for model in client.models.list()]}))


main()
