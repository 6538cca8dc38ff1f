"""HTTP around the engine: OpenAI's endpoints, SGLang's ``/generate``, metrics and the command line."""
