"""openai-agents: a Runner with a function tool, an output type and a hosted tool, on both routes."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    WebSearchTool,
    function_tool,
    set_tracing_disabled,
)
from forms import QUESTION, Cat, clock
from openai import AsyncOpenAI

url, model_name = sys.argv[1:]
set_tracing_disabled(True)
answers = {}
# The client takes a reply of /v1/responses that reached its longest length for a failure. At a high
# temperature, a model without training ends most replies before that.
settings = ModelSettings(max_tokens=900, temperature=2, extra_body={"seed": 1}, store=False)


async def ask() -> None:
    client = AsyncOpenAI(base_url=url, max_retries=0)
    models = {
        "chat": OpenAIChatCompletionsModel(model_name, openai_client=client),
        "responses": OpenAIResponsesModel(model_name, openai_client=client),
    }
    for name, model in models.items():
        agent = Agent(
            "cats",
            instructions="Be brief.",
            model=model,
            model_settings=settings.resolve(
                ModelSettings(tool_choice="required", parallel_tool_calls=False, metadata={"run": "1"})
            ),
            tools=[function_tool(clock)],
        )
        result = await Runner.run(agent, QUESTION)
        answers[f"{name} items"] = [item.type for item in result.new_items]
        chat = [*result.to_input_list(), {"role": "user", "content": QUESTION}]
        streamed = Runner.run_streamed(agent, chat)
        kinds = {event.type async for event in streamed.stream_events()}
        answers[f"{name} streamed"] = "raw_response_event" in kinds
        shaped = Agent("cats", model=model, output_type=Cat, model_settings=settings)
        answers[f"{name} cat"] = type((await Runner.run(shaped, QUESTION)).final_output).__name__
    tools = [WebSearchTool(), function_tool(clock)]
    searching = Agent("cats", model=models["responses"], tools=tools, model_settings=settings)
    answers["beside a hosted tool"] = type((await Runner.run(searching, QUESTION)).final_output).__name__


asyncio.run(ask())
print(json.dumps(answers))
