"""litellm: completion, stream, tools, responses, Anthropic's messages, and embeddings, which are refused."""

import asyncio
import json
import sys

import litellm
from forms import QUESTION, Cat

url, model_name = sys.argv[1:]
litellm.telemetry = False
model = f"openai/{model_name}"
messages = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CST"]}}, "required": ["zone"], "additionalProperties": False}},
}
answers = {}
common = {"model": model, "api_base": url, "max_tokens": 99, "temperature": 0}
whole = litellm.completion(messages=messages, **common, metadata={"run": "1"}, user="someone")
text = whole.choices[0].message.content
streamed = ""
for chunk in litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **common):
    streamed += chunk.choices[0].delta.content or "" if chunk.choices else ""
answers["streamed"] = streamed == text
reply = litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **common)
(call,) = reply.choices[0].message.tool_calls
answers["call"] = call.function.name
cat = litellm.completion(messages=messages, response_format=Cat, **common).choices[0].message.content
answers["cat"] = Cat.model_validate_json(cat).owner.at_home in (True, False)
response = litellm.responses(model=model, api_base=url, input=QUESTION, max_output_tokens=20, include=["reasoning.encrypted_content"], reasoning={"effort": "low"})
answers["response"] = response.object


async def anthropic() -> None:
    fields = {"model": model, "api_base": url, "max_tokens": 99}
    reply = await litellm.anthropic.messages.acreate(messages=messages, system="Be brief.", **fields)
    answers["anthropic"] = reply["type"]
    tool = {"name": "clock", "description": "The time.", "input_schema": TOOL["function"]["parameters"]}
    reply = await litellm.anthropic.messages.acreate(messages=messages, tools=[tool], tool_choice={"type": "any"}, thinking={"type": "enabled", "budget_tokens": 1024}, **fields)
    (use,) = [block for block in reply["content"] if block["type"] == "tool_use"]
    answers["anthropic call"] = use["name"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "noon"}
    more = [*messages, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
    reply = await litellm.anthropic.messages.acreate(messages=more, tools=[tool], **fields)
    answers["anthropic after the call"] = reply["type"]


asyncio.run(anthropic())
try:
    litellm.embedding(model=model, api_base=url, input=["the cat"])
except litellm.exceptions.NotFoundError as refusal:
    answers["embeddings"] = str(refusal)
print(json.dumps(answers))
