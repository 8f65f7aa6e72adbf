// Every word of the page, in both languages, and the switch between them.

export const WORDS = {
  en: {
    otherLanguage: "中文",
    otherLanguageLabel: "切换到中文",
    newChat: "New chat",
    welcome: "What would you like to know?",
    welcomeText: "This is a small language model, trained from scratch and running on this machine. Ask it in English or in Chinese.",
    placeholder: "Ask something",
    keys: "Enter sends, Shift + Enter starts a new line.",
    caution: "A small model makes mistakes: check what matters.",
    log: "Conversation",
    you: "You said",
    model: "The model said",
    send: "Send",
    halt: "Stop the answer",
    toEnd: "To the end of the conversation",
    copy: "Copy",
    copied: "Copied",
    copyFailed: "Could not copy",
    base: "pretrained",
    mid: "midtrained",
    sft: "fine-tuned",
    rl: "reinforced",
    step: "step {step}",
    about: "Model {tag} after stage “{stage}”, step {step}, context of {context} tokens",
    tokens: "{count} tokens",
    oneToken: "1 token",
    rate: "{rate} tokens/s",
    stopped: "stopped",
    length: "cut off at the length limit",
    noAnswer: "The model had nothing to say.",
    forgotten: "The model no longer sees what is above: its context holds {context} tokens.",
    toolName: "Calculator",
    toolText: "The model wrote “{expression}” for the calculator, which answered “{result}”.",
    toolFailed: "The model wrote “{expression}” for the calculator, which had no answer to it.",
    unreachable: "The server does not answer. Is it still running? Your message is back in the box.",
    broken: "The connection broke off before the answer was complete.",
    context_length_exceeded: "This message is too long: question and answer must fit into the model's context of {context} tokens. Please shorten it.",
    body_too_large: "This message is too long to be sent. Please shorten it.",
    queue_full: "Too many chats are waiting right now. Please try again in {seconds} seconds.",
    engine_failed: "The model failed while it was answering. The server's log says why.",
    server_stopping: "The server was stopped before the answer was complete.",
    failed: "The server refused this ({status}): {detail}",
    offline: "server not reachable",
  },
  zh: {
    otherLanguage: "English",
    otherLanguageLabel: "Switch to English",
    newChat: "新对话",
    welcome: "想聊点什么？",
    welcomeText: "这是一个从零训练的小语言模型，就运行在这台机器上。中文、英文都可以问。",
    placeholder: "输入你的问题",
    keys: "按 Enter 发送，Shift + Enter 换行。",
    caution: "小模型会出错，重要内容请核实。",
    log: "对话",
    you: "你说",
    model: "模型说",
    send: "发送",
    halt: "停止回答",
    toEnd: "回到对话末尾",
    copy: "复制",
    copied: "已复制",
    copyFailed: "复制失败",
    base: "预训练",
    mid: "中期训练",
    sft: "监督微调",
    rl: "强化学习",
    step: "第 {step} 步",
    about: "模型 {tag}，阶段：{stage}，第 {step} 步，上下文 {context} 个词元",
    tokens: "{count} 个词元",
    oneToken: "1 个词元",
    rate: "{rate} 词元/秒",
    stopped: "已停止",
    length: "达到长度上限，回答被截断",
    noAnswer: "模型没有说话。",
    forgotten: "模型已看不到以上内容：它的上下文只有 {context} 个词元。",
    toolName: "计算器",
    toolText: "模型把“{expression}”交给计算器，得到“{result}”。",
    toolFailed: "模型把“{expression}”交给计算器，但计算器算不出来。",
    unreachable: "服务器没有回应，它还在运行吗？你的消息已放回输入框。",
    broken: "连接中断，回答不完整。",
    context_length_exceeded: "这条消息太长：问题和回答合起来不能超过模型的上下文（{context} 个词元）。请缩短后再发。",
    body_too_large: "这条消息太长，无法发送。请缩短后再发。",
    queue_full: "现在排队的对话太多，请 {seconds} 秒后再试。",
    engine_failed: "模型在回答时出错，原因见服务器日志。",
    server_stopping: "服务器已停止，回答不完整。",
    failed: "服务器拒绝了请求（{status}）：{detail}",
    offline: "服务器无回应",
  },
};

// Questions a small model can answer; the page shows both languages, its own first.
export const EXAMPLES = {
  en: ["What is the capital of France?", "What is 37 * 48?", "What is the opposite of hot?"],
  zh: ["法国的首都是哪里？", "37 乘以 48 等于多少？", "企鹅会飞吗？"],
};

const KEY = "nanochat.language";
const said = new WeakMap(); // element -> values of its words, so that a switch can say them again
let language = remembered() ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");

function remembered() {
  try {
    const kept = localStorage.getItem(KEY);
    return kept in WORDS ? kept : null;
  } catch {
    return null; // storage may be forbidden
  }
}

export function currentLanguage() {
  return language;
}

export function hasWords(key) {
  return key in WORDS.en;
}

/** The words of a key; {name} takes a value, and a value that has words of its own is given as {key}. */
export function words(key, values = {}) {
  return WORDS[language][key].replace(/\{(\w+)\}/g, (_, name) => {
    const value = values[name];
    if (value?.key) return words(value.key);
    return typeof value === "number" ? value.toLocaleString(language) : String(value ?? "");
  });
}

/** Put words into an element as text (the default), as its label, title or placeholder; a switch translates them. */
export function say(element, key, values = {}, place = "text") {
  element.setAttribute(place === "text" ? "data-i18n" : `data-i18n-${place}`, key);
  said.set(element, { ...said.get(element), [place]: values });
  put(element, key, place);
}

function put(element, key, place) {
  const text = words(key, said.get(element)?.[place]);
  if (place === "text") element.textContent = text;
  else element.setAttribute(place === "label" ? "aria-label" : place, text);
}

/** Say everything on the page in the language that is chosen. */
export function translatePage() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const place of ["text", "label", "title", "placeholder"]) {
    const attribute = place === "text" ? "data-i18n" : `data-i18n-${place}`;
    for (const element of document.querySelectorAll(`[${attribute}]`)) put(element, element.getAttribute(attribute), place);
  }
}

export function switchLanguage() {
  language = language === "zh" ? "en" : "zh";
  try {
    localStorage.setItem(KEY, language);
  } catch {
    // the choice then lasts as long as the page
  }
  translatePage();
}
