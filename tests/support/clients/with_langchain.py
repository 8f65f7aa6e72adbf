"""LangChain's ChatOpenAI: invoke, stream, batch, bind_tools and with_structured_output."""

import json
import sys

from forms import QUESTION, Cat, clock
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

url, model_name = sys.argv[1:]
answers = {}
for name in ("chat", "responses"):
    chat = ChatOpenAI(
        model=model_name,
        base_url=url,
        max_tokens=99,
        temperature=0,
        use_responses_api=name == "responses",
    )
    messages = [
        SystemMessage("Be brief."),
        HumanMessage("Context: the cat is red."),
        HumanMessage(QUESTION),
        AIMessage("Red."),
        SystemMessage("Now in Chinese."),
        HumanMessage([{"type": "text", "text": QUESTION}]),
    ]
    reply = chat.invoke(messages)
    answers[f"{name} tokens"] = reply.usage_metadata["output_tokens"]
    streamed = "".join(chunk.text for chunk in chat.stream(messages))
    answers[f"{name} streamed"] = streamed == reply.text
    answers[f"{name} batch"] = len(chat.batch([QUESTION, "the cat", "the dog"]))
    clock_tool = tool(clock)
    called = chat.bind_tools([clock_tool], tool_choice="any").invoke(messages)
    (call,) = called.tool_calls
    answers[f"{name} call"] = call["name"]
    result = clock_tool.invoke(call)
    assert isinstance(result, ToolMessage)
    answers[f"{name} after the call"] = bool(
        chat.bind_tools([clock_tool]).invoke([*messages, called, result]).usage_metadata
    )
    methods = ("json_schema", "function_calling") if name == "responses" else ("json_schema", "function_calling", "json_mode")
    for method in methods[:2]:
        assert isinstance(chat.with_structured_output(Cat, method=method).invoke(messages), Cat)
        assert isinstance(chat.with_structured_output(Cat, method=method, include_raw=True, strict=True).invoke(messages)["parsed"], Cat)
print(json.dumps(answers))
