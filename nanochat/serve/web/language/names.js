// The example questions, and the names of the corpora.

// Questions that a small model can answer.
export const EXAMPLES = {
  en: ["What is the capital of France?", "What is 37 * 48?", "What is the opposite of hot?"],
  zh: ["法国的首都是哪里？", "37 乘以 48 等于多少？", "企鹅会飞吗？"],
};

// How the page writes the names of the corpora that come with nanochat.
export const CORPORA = { tinyworld: "TinyWorld", fineweb: "FineWeb-Edu" };
