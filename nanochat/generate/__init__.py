"""The parts of the engine, in the order to read them beside engine.py.

slots.py     a request, the slot of the cache that it has, and cached tokens that it can reuse
passes.py    new tokens through the model, and the scores of prompts;
             graphs.py replays decoding passes
sampling.py  the settings of a request, and how they choose tokens; adjust.py changes logits before
reply.py     the events of a reply, and what its tokens say: text, calculator calls, stop strings
adapters.py  several adapters (LoRA) on one model
schema/      replies that stay inside a JSON schema
"""
