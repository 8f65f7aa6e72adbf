"""Reads and writes Hugging Face folders: published models, their tokenizers, and peft adapters.

Read the modules in this order:
  config       config.json: the architecture of a model, and its shape
  weights      safetensors files, read one parameter at a time
  tokenizer    tokenizer.json, with the interface of our own tokenizer
  chat_format  what the chat template of a model writes, and what it can write;
               template renders it in a child process (template_child)
  segments     the special tokens and the texts of a rendered conversation
  adapter      adapter_config.json and adapter_model.safetensors
  base         a published model that is to be fine-tuned
"""
