"""The parts of the engine, listed in the order in which to read them alongside engine.py.

request.py   a request, and how much of its prompt and reply the cache holds
slots.py     the slot of a request in the cache, and the cached tokens that it can reuse
passes.py    runs new tokens through the model, and computes the scores of prompts;
             graphs.py replays decoding passes
sampling.py  the settings of a request
choice.py    the choice of tokens by these settings; adjust.py changes logits before that
reply.py     the events of a reply, and what its tokens mean: text, calculator calls, stop strings
budget.py    limits the prompt tokens of a step, so that running replies do not stall
drafts.py    guesses tokens, so that one pass checks several of them
adapters.py  serves several adapters (LoRA) with one model
schema/      keeps replies within a JSON schema
"""
