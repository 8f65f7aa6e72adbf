"""The messages of the terminal chat to its user, in English and in Chinese."""

TEXTS = {
    "en": {
        "model": "model: stage {stage}, tag {tag}, step {step}, context of {context} tokens",
        "published": "model: {tag} (published), context of {context} tokens",
        "server": "model: {model}, at {url}",
        "latest": "this is the last finished model, of {saved}",
        "passed": "a newer model, unfinished or a test run, is chosen by: {flags}",
        "unfinished": "its run is {state}: a finished model answers better",
        "others": "other models: {flags}",
        "drawing": "temperature {temperature:g}, min-p {min_p:g}: {reason}",
        "base": "this is a base model, which has not learned to chat: it continues the text that "
        "you type",
        "smoke": "the smoke preset trained this model for a few steps to test the installation: it "
        "can answer nothing. Train one that answers with: bash speedrun.sh",
        "hello": "/help lists the commands, Ctrl-C stops a reply, Ctrl-D ends the chat",
        "help": """/help         show this list
/new          start a new chat; the instructions stay
/system TEXT  set the instructions and start a new chat; without TEXT, clear the instructions
/temp X       set the temperature; 0 always takes the likeliest token (now {temperature})
/topk N       sample from the N likeliest tokens; 0 samples from all (now {top_k})
/max N        set the longest reply in tokens (now {max_tokens})
/save FILE    save the chat to a file
/load FILE    load a chat from a file and continue it
/quit         end the chat
\"\"\"           type this before and after a text of several lines""",
        "new": "started a new chat",
        "set": "temperature: {temperature}; top-k: {top_k}; longest reply in tokens: {max_tokens}",
        "unsaid": "the server's default",
        "most": "a reply has at most {most} tokens here, because the server's context of {context} "
        "tokens must "
        "also hold the chat",
        "number": "{command} needs a number, got {given!r}: type {command} 1, for example",
        "whole": "{command} needs a whole number, got {given!r}: type {command} 50, for example",
        "hot": "{name} must be from 0 to {most}, got {given:g}: type {name} 1, for example",
        "long": "{name} must be from 1 to {most:,}, got {given:,}: a reply must fit into the "
        "context. Type {name} 50, for example",
        "file": "{command} needs a file name: type {command} chat.json, for example",
        "home": "there is no home folder for {given}: type another path, such as {command} "
        "./chat.json",
        "nothing": "nothing has been said yet, and {path} would be emptied: to continue the chat in "
        "it, type /load {path}",
        "saved": "saved {count} messages to {path}",
        "loaded": "loaded {count} messages from {path}",
        "unknown": "there is no command {command}: see /help. To send a text that begins with /, "
        "put a space first",
        "forgotten": "the context is full: the model no longer sees the first {count} messages",
        "length": "the reply was cut off at its length limit: /max N sets another limit, /new "
        "makes room",
        "stopped": "stopped",
        "empty": "the model said nothing",
        "speed": "{tokens} tokens, {rate:.0f} tokens/s, context {used} of {context}",
        "rate": "{tokens} tokens, {rate:.0f} tokens/s",
        "bye": "Ctrl-D or /quit ends the chat",
        "unkept": "what you type will not be there in the next chat: {path} cannot be written "
        "({why})",
    },
    "zh": {
        "model": "模型：{tag}，阶段 {stage}，第 {step} 步，上下文 {context} 个词元",
        "published": "模型：{tag}（已发布），上下文 {context} 个词元",
        "server": "模型：{model}，服务器 {url}",
        "latest": "这是最近训练完的模型（{saved}）",
        "passed": "还有更新的模型（没有训练完，或只是试跑）：用 {flags} 选择",
        "unfinished": "这个模型的训练{state}，训练完再用效果更好",
        "others": "其他模型：{flags}",
        "drawing": "温度 {temperature:g}，min-p {min_p:g}：{reason}",
        "base": "这是基座模型，还没有学过对话，只会接着你输入的文字往下写",
        "smoke": "smoke 预设只训练几步，用来检验安装，这个模型什么也答不出来；要训练能回答问题的：bash speedrun.sh",
        "hello": "输入 /help 查看命令；Ctrl-C 停止回答，Ctrl-D 退出",
        "help": """/help         显示本列表
/new          开始新对话，系统提示不变
/system 文字  设置系统提示并开始新对话；不写文字则清除系统提示
/temp X       设置温度，0 表示总取概率最高的词元（现为 {temperature}）
/topk N       只从概率最高的 N 个词元中采样，0 表示不限（现为 {top_k}）
/max N        设置回答的最大词元数（现为 {max_tokens}）
/save 文件    把对话保存到文件
/load 文件    从文件载入对话并继续
/quit         退出
\"\"\"           输入多行文字时，放在开头和结尾""",
        "new": "已开始新对话",
        "set": "温度：{temperature}；top-k：{top_k}；回答的最大词元数：{max_tokens}",
        "unsaid": "服务器的默认值",
        "most": "服务器的上下文为 {context} 个词元，还要放下对话，因此回答最多 {most} 个词元",
        "number": "{command} 后面要写数字，不能写 {given!r}；例如 {command} 1",
        "whole": "{command} 后面要写整数，不能写 {given!r}；例如 {command} 50",
        "hot": "{name} 必须在 0 到 {most} 之间，不能是 {given:g}；例如 {name} 1",
        "long": "{name} 必须在 1 到 {most:,} 之间，不能是 {given:,}；回答要放得进上下文，例如 {name} 50",
        "file": "{command} 后面要写文件名，例如 {command} chat.json",
        "home": "找不到 {given} 中的用户主目录，请换一个路径，例如 {command} ./chat.json",
        "nothing": "现在还没有对话内容，保存会清空 {path}；要继续其中的对话，请输入 /load {path}",
        "saved": "已把 {count} 条消息保存到 {path}",
        "loaded": "已从 {path} 载入 {count} 条消息",
        "unknown": "没有命令 {command}，输入 /help 查看命令；要发送以 / 开头的文字，请在前面加一个空格",
        "forgotten": "上下文已满，模型看不到最前面的 {count} 条消息了",
        "length": "回答达到长度上限，已截断；/max N 可调整上限，/new 可腾出上下文",
        "stopped": "已停止",
        "empty": "模型没有给出回答",
        "speed": "{tokens} 个词元，每秒 {rate:.0f} 个，上下文 {used}/{context}",
        "rate": "{tokens} 个词元，每秒 {rate:.0f} 个",
        "bye": "按 Ctrl-D 或输入 /quit 退出",
        "unkept": "这次输入的内容不会留到下次：{path} 无法写入（{why}）",
    },
}
