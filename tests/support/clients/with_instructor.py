"""instructor: nested models by its modes for tools, for JSON schemas and for JSON, on both routes."""

import json
import sys

import instructor
from forms import QUESTION, Cat, Colour
from openai import OpenAI
from pydantic import BaseModel


class Guess(BaseModel):
    """In the mode JSON, the server holds a reply to any object, so that no field may be required."""

    colour: Colour = Colour.RED


url, model_name = sys.argv[1:]
answers = {}
modes = {"TOOLS": Cat, "TOOLS_STRICT": Cat, "JSON_SCHEMA": Cat, "RESPONSES_TOOLS": Cat, "JSON": Guess}
for mode, form in modes.items():
    client = instructor.from_openai(OpenAI(base_url=url, max_retries=0), mode=instructor.Mode[mode])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    reply = client.chat.completions.create(
        model=model_name, messages=messages, response_model=form, max_retries=0, max_tokens=300, temperature=0
    )
    answers[mode] = type(reply).__name__
print(json.dumps(answers))
