"""openai-agents: the Runner with a function tool, on both routes, whole and streamed."""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled, WebSearchTool
from forms import QUESTION, Cat, clock
from openai import AsyncOpenAI

url, model_name = sys.argv[1:]
set_tracing_disabled(True)
answers = {}


async def ask() -> None:
    client = AsyncOpenAI(base_url=url, max_retries=0)
    for name, model_class in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
        model = model_class(model_name, openai_client=client)
        settings = ModelSettings(max_tokens=900, tool_choice="required", temperature=2, extra_body={"seed": 1}, parallel_tool_calls=False, metadata={"a": "b"}, store=False)
        agent = Agent("cats", instructions="Be brief.", model=model, model_settings=settings, tools=[function_tool(clock)])
        result = await Runner.run(agent, QUESTION)
        answers[f"{name} items"] = [item.type for item in result.new_items]
        streamed = Runner.run_streamed(agent, result.to_input_list() + [{"role": "user", "content": QUESTION}])
        kinds = {event.type async for event in streamed.stream_events()}
        answers[f"{name} streamed"] = sorted(kinds)
        shaped = Agent("cats", model=model, output_type=Cat, model_settings=ModelSettings(max_tokens=200))
        assert isinstance((await Runner.run(shaped, QUESTION)).final_output, Cat)
    hosted = Agent("cats", model=model, tools=[WebSearchTool(), function_tool(clock)], model_settings=ModelSettings(max_tokens=2000))
    answers["beside a hosted tool"] = isinstance((await Runner.run(hosted, QUESTION)).final_output, str)


asyncio.run(ask())
print(json.dumps(answers))
