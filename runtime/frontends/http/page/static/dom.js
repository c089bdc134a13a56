// Elements without markup: text from the server or a model is only ever text.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((one) => one !== null && one !== undefined));
  return element;
}

export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

/** Set the text only where it differs, so that assistive technology is not notified twice. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A group of radio buttons that look like one control. */
export function segments(fieldset, name, choices, chosen, onChoice) {
  const legend = fieldset.querySelector("legend");
  const items = choices.map(([value, label]) => {
    const input = html("input", {
      type: "radio", name, id: `${name}-${value}`, value, onchange: () => onChoice(value),
    });
    input.checked = value === chosen;
    return html("span", {}, input, html("label", { for: `${name}-${value}` }, label));
  });
  fieldset.replaceChildren(legend, ...items);
}
