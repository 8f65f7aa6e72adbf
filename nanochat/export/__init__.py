"""Export: writes checkpoints in the formats of other programs.

`python -m nanochat.export` writes a folder for Hugging Face transformers, and for models of the
Qwen family also vLLM, or one GGUF file for llama.cpp. Adapters are merged. Read in this order:

- huggingface.py: the folder with config, tokenizer, README and weights.
- modeling_nanochat.py: the GPT as transformers loads it, a file that is copied into the folder.
- llama.py: names and layout of the parameters for llama.cpp; llama_vocabulary.py: its vocabulary.
- gguf.py: the file format itself.
- __main__.py: the command line.
"""
