"""LangChain's ChatOpenAI: invoke, stream, batch, bind_tools and with_structured_output, on both routes."""

import json
import sys

from forms import QUESTION, Cat, clock
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model_name = sys.argv[1:]
MESSAGES = [
    SystemMessage("Be brief."),
    HumanMessage("Context: the cat is red."),
    HumanMessage(QUESTION),
    AIMessage("Red."),
    SystemMessage("Now in Chinese."),
    HumanMessage([{"type": "text", "text": QUESTION}]),
]
clock_tool = tool(clock)
answers = {}
for route in ("chat", "responses"):
    chat = ChatOpenAI(
        model=model_name,
        base_url=url,
        max_tokens=150,
        temperature=0,
        use_responses_api=route == "responses",
    )
    reply = chat.invoke(MESSAGES)
    streamed = "".join(chunk.text for chunk in chat.stream(MESSAGES))
    answers[f"{route} streamed as whole"] = streamed == reply.text
    answers[f"{route} batch"] = len(chat.batch([QUESTION, "the cat", "the dog"]))
    called = chat.bind_tools([clock_tool], tool_choice="any").invoke(MESSAGES)
    (call,) = called.tool_calls
    answers[f"{route} call"] = call["name"]
    result = clock_tool.invoke(call)
    after = chat.bind_tools([clock_tool]).invoke([*MESSAGES, called, result])
    answers[f"{route} after the call"] = after.usage_metadata["output_tokens"] > 0
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            shaped = chat.with_structured_output(Cat, method=method, strict=strict)
            answers[f"{route} {method} {strict}"] = type(shaped.invoke(MESSAGES)).__name__
print(json.dumps(answers))
