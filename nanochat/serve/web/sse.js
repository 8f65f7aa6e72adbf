// Reads server-sent events from a stream of bytes.

/**
 * Yields the `data` of every event. The bytes may be split anywhere: in a character, in a line, between \r and \n.
 * If the stream ends inside an event, that event is dropped, as the standard requires.
 */
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const lines = rest.split(/\r\n|\n|\r(?!$)/); // a last \r may be the first half of \r\n
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // when the caller stops reading, the server stops too
  }
}
