// Server-sent events of an answer to a POST, which EventSource cannot send.

/** Yields each event's data; a server that says nothing more without [DONE] is an error. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off before its end.");
    rest += value;
    const whole = rest.split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
