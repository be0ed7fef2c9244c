// Clients of Node: OpenAI's, the Vercel AI SDK and Cohere's, each answer as plain data.
// Arguments: url, query, documents, messages, prompt.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [given, answer] = process.argv.slice(2);
const { url, query, documents, messages, prompt } = JSON.parse(readFileSync(given, "utf-8"));

// The packages stand in the working folder, and not above this file.
const near = createRequire(`${process.cwd()}/package.json`);
const load = (name) => import(pathToFileURL(near.resolve(name)));
const { default: OpenAI } = await load("openai");
const { APICallError, generateText, streamText } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { CohereClientV2 } = near("cohere-ai");

async function told(call) {
  try {
    await call();
  } catch (error) {
    const kind = error.constructor.name;
    return { kind, status: error.status ?? error.statusCode, code: error.code ?? null, param: error.param ?? null };
  }
  return { kind: null };
}

async function all(stream) {
  const found = [];
  for await (const part of stream) found.push(part);
  return found;
}

async function openai() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
  const text = { model: "builtin", prompt, max_tokens: 12, temperature: 0 };
  const chat = { model: "builtin", messages, temperature: 0 };
  const create = client.chat.completions.create.bind(client.chat.completions);
  const { data, response } = await client.completions.create(text).withResponse();
  const raw = client.chat.completions.stream(chat);
  const rows = await all(await create({ ...chat, stream: true, stream_options: { include_usage: true } }));
  return {
    models: (await all(client.models.list())).map((model) => model.id),
    text: data,
    id: { body: data.id, request: data._request_id, header: response.headers.get("x-request-id") },
    text_parts: await all(await client.completions.create({ ...text, stream: true })),
    chat: await create(chat),
    chat_parts: rows,
    helper: await raw.finalContent(),
    errors: {
      temperature: await told(() => client.completions.create({ ...text, temperature: 9 })),
      model: await told(() => create({ ...chat, model: "other" })),
      long: await told(() => client.completions.create({ ...text, prompt: Array(4000).fill(1) })),
    },
  };
}

async function vercel() {
  const provider = createOpenAICompatible({ name: "assay", baseURL: `${url}/v1`, apiKey: "any", includeUsage: true });
  const system = messages.filter((one) => one.role === "system").map((one) => one.content).join("\n");
  const rest = messages.filter((one) => one.role !== "system");
  const chat = { model: provider("builtin"), system, messages: rest, temperature: 0, maxRetries: 0 };
  const plain = await generateText(chat);
  const streamed = streamText(chat);
  const parts = await all(streamed.textStream);
  return {
    plain: { text: plain.text, finish: plain.finishReason, usage: plain.usage },
    parts,
    finish: await streamed.finishReason,
    usage: await streamed.usage,
    error: await told(() => generateText({ ...chat, model: provider("other") })),
    known: APICallError.isInstance(await generateText({ ...chat, temperature: 9 }).catch((error) => error)),
  };
}

async function cohere() {
  const client = new CohereClientV2({ token: "any", environment: url, baseUrl: url });
  const rank = { model: "builtin", query, documents };
  const plain = (found) => ({
    id: found.id,
    results: found.results.map((one) => ({ index: one.index, score: one.relevanceScore })),
    units: found.meta?.billedUnits?.searchUnits,
  });
  const once = { maxRetries: 0 };
  return {
    plain: plain(await client.rerank(rank, once)),
    best: plain(await client.rerank({ ...rank, topN: 2 }, once)),
    cut: plain(await client.rerank({ ...rank, maxTokensPerDoc: 2 }, once)),
    errors: {
      model: await told(() => client.rerank({ ...rank, model: "other" }, once)),
      nothing: await told(() => client.rerank({ ...rank, documents: [] }, once)),
    },
  };
}

const found = { openai: await openai(), vercel: await vercel(), cohere: await cohere() };
writeFileSync(answer, JSON.stringify(found));
