"""A real llama.cpp server as a child process: `python -m serve.llamacpp GGUF`."""
