"""Serves chats: an OpenAI-compatible API, the web page, and the terminal chat.

A chat request passes through the files in this order, which is also the order to read them in:

listening.py      accepts the connection, checks the host name and the key;
                  connections.py has the deadlines
server.py         reads the body and prepares the request in its turn; waiting.py has the queues
models.py         the model that answers: its engine's thread, its limits and its counters
routes/chat.py    reads the fields (fields.py), the messages (messages.py) and the tools (tools.py)
engine_thread.py  hands the prompts to the engine, and returns its events to the event loop
routes/answers.py follows the replies and sends what chat.py writes of them

app.py builds the application out of these and the pages in web/. The other files of routes/ are the
other formats of the API. runs/ shows training while it happens. chosen.py has the flags that choose
a model, for the scripts chat_web and chat_cli, and cli/ has the terminal chat. chosen.py and
cli/ belong to the core; everything else is an appendix.
"""
