"""pydantic-ai: an agent with instructions, a tool, an output of a nested model, and a stream."""

import asyncio
import json
import sys

from forms import QUESTION, Cat, clock
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model_name = sys.argv[1:]
provider = OpenAIProvider(base_url=url)
answers = {}


async def ask() -> None:
    for name, model_class in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
        model = model_class(model_name, provider=provider, settings={"max_tokens": 200})
        agent = Agent(model, instructions="Be brief.", system_prompt="You know cats.", tools=[clock])
        first = await agent.run(QUESTION)
        assert isinstance(first.output, str)
        second = await agent.run("and the dog?", message_history=first.all_messages())
        answers[f"{name} turns"] = len(second.all_messages())
        async with agent.run_stream(QUESTION) as stream:
            answers[f"{name} streamed"] = (await stream.get_output()) == stream.response.text
        for output in (Cat, NativeOutput(Cat)):
            cat = (await Agent(model, output_type=output, instructions="Be brief.").run(QUESTION)).output
            assert isinstance(cat, Cat)
        # A call is required here: of the tool, or of the one that takes the output.
        agent = Agent(model, output_type=Cat, tools=[clock], retries=3)
        result = await agent.run(QUESTION, model_settings={"temperature": 1.5})
        assert isinstance(result.output, Cat)


asyncio.run(ask())
print(json.dumps(answers))
