"""anthropic: chats, streams, tools, thoughts, counts, errors and retries, and litellm as its client."""

import asyncio
import json
import sys

import anthropic
import httpx2
import litellm
from forms import QUESTION, Cat

url, model_name = sys.argv[1:]
url = url.removesuffix("/v1")
KEY = "sk-test"
client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": QUESTION}]
base = {"model": model_name, "messages": messages, "max_tokens": 120}
greedy = {"temperature": 0}  # which newer versions of the library have no argument for
clock = {
    "name": "clock",
    "description": "The time.",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CST"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
answers = {}


def refusal(call, *arguments, **fields):
    """The status of a refused call, the class that the library raises for it, and the server's type of it."""
    try:
        call(*arguments, **fields)
    except anthropic.APIStatusError as failure:
        return [failure.status_code, type(failure).__name__, failure.body["error"]["type"]]


# Text, whole and streamed.
whole = client.messages.create(
    **base,
    system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    extra_body={**greedy, "top_k": 40, "top_p": 0.9},
    stop_sequences=["zzz"],
    metadata={"user_id": "someone"},
)
answers["message"] = [whole.type, whole.role, whole.stop_reason, whole.usage.output_tokens]
with client.messages.stream(**base, system="Be brief.", extra_body=greedy) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_message()
answers["streamed as whole"] = final.content[0].text == whole.content[0].text
answers["last event"] = kinds[-1]
answers["usage"] = final.usage.input_tokens + final.usage.cache_read_input_tokens == (
    whole.usage.input_tokens + whole.usage.cache_read_input_tokens
)
raw = list(client.messages.create(**base, stream=True))
answers["events"] = sorted({event.type for event in raw})
counted = client.messages.count_tokens(model=model_name, messages=messages, system="Be brief.")
answers["count"] = counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens

# Tools, streamed and whole, and their results.
with client.messages.stream(**base, tools=[clock], tool_choice={"type": "any"}) as stream:
    pieces = [event.partial_json for event in stream if event.type == "input_json"]
    called = stream.get_final_message()
(use,) = called.content
answers["call"] = [called.stop_reason, use.name, json.loads("".join(pieces)) == use.input]
result = {
    "type": "tool_result",
    "tool_use_id": use.id,
    "content": [{"type": "text", "text": "noon"}],
    "is_error": False,
}
chat = [*messages, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
after = client.messages.create(**{**base, "messages": chat}, tools=[clock])
answers["after the call"] = after.type
runs = []


@anthropic.beta_tool
def lookup(zone: str) -> str:
    """Look up the time.

    Args:
        zone: The zone.
    """
    runs.append(zone)
    return "noon"


runner = client.beta.messages.tool_runner(**base, tools=[lookup])
answers["tool runner"] = runner.until_done().type
parsed = client.messages.parse(**{**base, "max_tokens": 150}, output_format=Cat)
answers["parsed"] = type(parsed.parsed_output).__name__

# Thoughts are asked for, though this model has none.
thinking = client.messages.create(**base, thinking={"type": "enabled", "budget_tokens": 1024})
answers["thinking"] = [block.type for block in thinking.content]

# Refusals.
answers["too long"] = refusal(
    client.messages.create, **{**base, "messages": [{"role": "user", "content": "the cat " * 9000}]}
)
image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
answers["image"] = refusal(client.messages.create, **{**base, "messages": [{"role": "user", "content": [image]}]})
answers["wrong key"] = refusal(anthropic.Anthropic(base_url=url, api_key="no", max_retries=0).messages.create, **base)
answers["no model"] = refusal(client.messages.create, **{**base, "model": "claude-sonnet-5"})
with anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0) as bearer:
    answers["token"] = bearer.messages.create(**base).type
answers["models"] = [model.id for model in client.models.list()] == [model_name]


# More at once than the server takes: the library waits as the server says, and tries again.
tries = []


async def count(response: httpx2.Response) -> None:
    tries.append(response.status_code)


async def batch() -> list[str]:
    async with httpx2.AsyncClient(event_hooks={"response": [count]}, timeout=60) as http:
        many = anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=10, http_client=http)
        replies = await asyncio.gather(*(many.messages.create(**base) for _ in range(12)))
    return [reply.type for reply in replies]


answers["batch"] = asyncio.run(batch()) == ["message"] * 12
answers["tried again"] = 429 in tries and set(tries) <= {200, 429}

# litellm as a client of the format.
litellm.telemetry = False
server = {"model": f"anthropic/{model_name}", "api_base": url, "api_key": KEY}
told = litellm.completion(messages=messages, max_tokens=40, temperature=0, **server)
chunks = litellm.completion(messages=messages, max_tokens=40, temperature=0, stream=True, **server)
texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
answers["litellm"] = bool(told.choices[0].message.content) and "".join(texts) == told.choices[0].message.content
tool = {"type": "function", "function": {"name": "clock", "parameters": clock["input_schema"]}}
calls = litellm.completion(
    messages=messages, max_tokens=120, tools=[tool], tool_choice="required", stream=True, **server
)
built = litellm.stream_chunk_builder(list(calls), messages=messages)
answers["litellm call"] = built.choices[0].message.tool_calls[0].function.name


# A stream of this call needs the packages of litellm's proxy.
passed = asyncio.run(litellm.anthropic.messages.acreate(messages=messages, max_tokens=40, **server))
answers["litellm messages"] = passed["type"]
print(json.dumps(answers))
