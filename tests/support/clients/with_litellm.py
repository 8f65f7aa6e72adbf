"""litellm: chats, streams, tools, responses, Anthropic's messages over /v1/responses, and embeddings.

Streams of Anthropic's messages are left out: litellm needs the packages of its proxy for these.
"""

import asyncio
import json
import sys

import litellm
from forms import QUESTION, Cat

url, model_name = sys.argv[1:]
litellm.telemetry = False
messages = [{"role": "user", "content": QUESTION}]
parameters = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CST"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
clock = {"type": "function", "function": {"name": "clock", "parameters": parameters}}
anthropic_clock = {"name": "clock", "description": "The time.", "input_schema": parameters}
server = {"model": f"openai/{model_name}", "api_base": url}
settings = {**server, "max_tokens": 150, "temperature": 0}
answers = {}

whole = litellm.completion(messages=messages, metadata={"run": "1"}, user="someone", **settings)
stream = litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **settings)
texts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
answers["streamed as whole"] = "".join(texts) == whole.choices[0].message.content
called = litellm.completion(
    messages=messages, tools=[clock], tool_choice="required", parallel_tool_calls=False, **settings
)
answers["call"] = called.choices[0].message.tool_calls[0].function.name
shaped = litellm.completion(messages=messages, response_format=Cat, **settings)
answers["cat"] = type(Cat.model_validate_json(shaped.choices[0].message.content)).__name__
response = litellm.responses(
    input=QUESTION,
    max_output_tokens=20,
    include=["reasoning.encrypted_content"],
    reasoning={"effort": "low"},
    **server,
)
answers["response"] = response.object


async def anthropic() -> None:
    create = litellm.anthropic.messages.acreate
    first = await create(messages=messages, system="Be brief.", max_tokens=99, **server)
    answers["anthropic"] = first["type"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    second = await create(
        messages=messages,
        tools=[anthropic_clock],
        tool_choice={"type": "any"},
        thinking=thinking,
        max_tokens=99,
        **server,
    )
    (use,) = [block for block in second["content"] if block["type"] == "tool_use"]
    answers["anthropic call"] = use["name"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "noon"}
    chat = [
        *messages,
        {"role": "assistant", "content": second["content"]},
        {"role": "user", "content": [result]},
    ]
    third = await create(messages=chat, tools=[anthropic_clock], max_tokens=99, **server)
    answers["anthropic after the call"] = third["type"]


asyncio.run(anthropic())
try:
    litellm.embedding(input=["the cat"], **server)
except litellm.exceptions.NotFoundError as refusal:
    answers["embeddings"] = "/v1/embeddings" in str(refusal)
print(json.dumps(answers))
