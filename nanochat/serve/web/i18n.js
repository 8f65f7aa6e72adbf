// Every text of the page in both languages, and the switch between the languages.

export const WORDS = {
  en: {
    otherLanguage: "中文",
    otherLanguageLabel: "切换到中文",
    newChat: "New chat",
    welcome: "Chat with a small language model",
    welcomeText: "It was trained from scratch and runs on this machine. It knows only what was in its training data, so begin with a simple question, in English or Chinese.",
    placeholder: "Ask something",
    keys: "Press Enter to send, Shift + Enter for a new line.",
    caution: "Small models make mistakes. Check anything that matters.",
    log: "Conversation",
    you: "You said",
    model: "The model said",
    send: "Send",
    halt: "Stop answering",
    toEnd: "Jump to the latest message",
    copy: "Copy",
    copied: "Copied",
    copyFailed: "Could not copy",
    base: "pretrained",
    mid: "midtrained",
    sft: "fine-tuned",
    rl: "RL-tuned",
    about: "Model {tag} ({stage}), step {step}, context of {context} tokens",
    tokens: "{count} tokens",
    oneToken: "1 token",
    rate: "{rate} tokens/s",
    stopped: "stopped",
    length: "cut off at the length limit",
    noAnswer: "The model had nothing to say.",
    forgotten: "The model no longer sees the messages above: its context holds only {context} tokens.",
    toolName: "Calculator",
    toolText: "The model asked the calculator for “{expression}” and got “{result}”.",
    toolFailed: "The model asked the calculator for “{expression}” and got no answer.",
    unreachable: "The server does not answer. Check that it is still running. Your message is back in the input box.",
    broken: "The connection was lost before the answer was complete. Please try again.",
    context_length_exceeded: "This message is too long: question and answer together must fit into the model's context of {context} tokens. Please shorten it.",
    body_too_large: "This message is too long to send. Please shorten it.",
    queue_full: "Too many chats are waiting right now. Please try again in {seconds} seconds.",
    engine_failed: "The model failed while it was answering. The server's log says why.",
    server_stopping: "The server was stopped before the answer was complete.",
    failed: "The server refused this request ({status}): {detail}",
    offline: "server not reachable",
  },
  zh: {
    otherLanguage: "English",
    otherLanguageLabel: "Switch to English",
    newChat: "新对话",
    welcome: "和一个小语言模型聊聊",
    welcomeText: "它从零开始训练，就运行在这台机器上，只知道训练数据里有的内容。先用中文或英文问个简单的问题吧。",
    placeholder: "输入你的问题",
    keys: "按 Enter 发送，Shift + Enter 换行。",
    caution: "小模型会出错，重要内容请核实。",
    log: "对话",
    you: "你说",
    model: "模型说",
    send: "发送",
    halt: "停止回答",
    toEnd: "跳到最新消息",
    copy: "复制",
    copied: "已复制",
    copyFailed: "复制失败",
    base: "预训练",
    mid: "中期训练",
    sft: "监督微调",
    rl: "强化学习",
    about: "模型 {tag}（{stage}），第 {step} 步，上下文 {context} 个词元",
    tokens: "{count} 个词元",
    oneToken: "1 个词元",
    rate: "{rate} 词元/秒",
    stopped: "已停止",
    length: "回答达到长度上限，已截断",
    noAnswer: "模型没有给出回答。",
    forgotten: "模型看不到以上消息了：它的上下文只能容纳 {context} 个词元。",
    toolName: "计算器",
    toolText: "模型用计算器算了“{expression}”，结果是“{result}”。",
    toolFailed: "模型想用计算器算“{expression}”，但计算器算不出来。",
    unreachable: "服务器没有响应，请检查它是否还在运行。你的消息已放回输入框。",
    broken: "连接中断，回答不完整，请重试。",
    context_length_exceeded: "这条消息太长：问题和回答加起来不能超过模型的上下文（{context} 个词元）。请缩短后再发。",
    body_too_large: "这条消息太长，无法发送。请缩短后再发。",
    queue_full: "现在排队的对话太多，请 {seconds} 秒后再试。",
    engine_failed: "模型在回答时出错，原因见服务器日志。",
    server_stopping: "服务器已停止，回答不完整。",
    failed: "服务器拒绝了这个请求（{status}）：{detail}",
    offline: "连接不上服务器",
  },
};

// Questions that a small model can answer. The page shows both languages, the current one first.
export const EXAMPLES = {
  en: ["What is the capital of France?", "What is 37 * 48?", "What is the opposite of hot?"],
  zh: ["法国的首都是哪里？", "37 乘以 48 等于多少？", "企鹅会飞吗？"],
};

const KEY = "nanochat.language";
const said = new WeakMap(); // element -> values in its texts, so that a switch can write the texts again
let language = remembered() ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");

function remembered() {
  try {
    const kept = localStorage.getItem(KEY);
    return kept in WORDS ? kept : null;
  } catch {
    return null; // the browser may forbid storage
  }
}

export function currentLanguage() {
  return language;
}

export function hasWords(key) {
  return key in WORDS.en;
}

/** The text of a key. {name} in the text takes a value; a value that is itself a text is given as an object {key}. */
export function words(key, values = {}) {
  return WORDS[language][key].replace(/\{(\w+)\}/g, (_, name) => {
    const value = values[name];
    if (value?.key) return words(value.key);
    return typeof value === "number" ? value.toLocaleString(language) : String(value ?? "");
  });
}

/** Set the text of an element, or its label, title or placeholder. A language switch translates it. */
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

/** Write every text of the page in the current language. */
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
    // without storage, the choice lasts until the page is closed
  }
  translatePage();
}
