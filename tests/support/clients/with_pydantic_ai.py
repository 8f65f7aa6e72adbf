"""pydantic-ai: agents with instructions, a tool and an output of a nested model, on both routes."""

import asyncio
import json
import sys

from forms import QUESTION, Cat, clock
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model_name = sys.argv[1:]
provider = OpenAIProvider(base_url=url)
answers = {}


async def ask() -> None:
    for route, model_class in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
        model = model_class(model_name, provider=provider, settings={"max_tokens": 200})
        agent = Agent(model, instructions="Be brief.", system_prompt="You know cats.", tools=[clock])
        first = await agent.run(QUESTION)
        second = await agent.run("and the dog?", message_history=first.all_messages())
        answers[f"{route} messages"] = len(second.all_messages())
        async with agent.run_stream(QUESTION) as stream:
            text = await stream.get_output()
            answers[f"{route} streamed as whole"] = text == stream.response.text
        for name, output in (("tool", Cat), ("native", NativeOutput(Cat))):
            shaped = Agent(model, output_type=output, instructions="Be brief.")
            answers[f"{route} {name}"] = type((await shaped.run(QUESTION)).output).__name__
        # Every reply must be a call here: of the tool, or of the one that takes the output.
        both = Agent(model, output_type=Cat, tools=[clock], retries=3)
        result = await both.run(QUESTION, model_settings={"temperature": 1.5})
        answers[f"{route} beside a tool"] = type(result.output).__name__


asyncio.run(ask())
print(json.dumps(answers))
