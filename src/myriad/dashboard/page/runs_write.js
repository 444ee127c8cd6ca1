/** What `myriad watch --write` allows: notes and tags, archive, and deletion of the chosen runs after a confirmation. */

import { post } from "./api.js";
import { bytes, count, plural } from "./format.js";
import { html, useLayoutEffect, useRef, useState } from "./html.js";
import { Problem } from "./widgets.js";

/** A dialog that keeps the focus; Escape closes it. @param {{title: string, onClose: () => void, children: any}} props */
function Dialog({ title, onClose, children }) {
  const box = useRef(null);
  useLayoutEffect(() => box.current.showModal(), []);
  return html`<dialog ref=${box} onClose=${onClose} aria-label=${title}><h2>${title}</h2>${children}</dialog>`;
}

/** Sends a change; the dialog shows why it was refused. @param {() => void} onDone */
function useChange(onDone) {
  const [state, setState] = useState({ busy: false, error: undefined });
  const send = async (path, body) => {
    setState({ busy: true, error: undefined });
    try {
      const answer = await post(path, body);
      const problems = answer.problems ?? [];
      setState({ busy: false, error: problems.length ? new Error(problems.join("; ")) : undefined });
      if (!problems.length) onDone(answer);
      return answer;
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return { ...state, send };
}

/** The button of a row that opens its note and tags. @param {{row: any, onWritten: () => void}} props */
export function EditNotes({ row, onWritten }) {
  const [open, setOpen] = useState(false);
  return html`<button class="plain" aria-label="Edit the note of ${row.name}" onClick=${() => setOpen(true)}>✎</button>
    ${open && html`<${NotesForm} row=${row} onClose=${() => setOpen(false)} onWritten=${onWritten} />`}`;
}

function NotesForm({ row, onClose, onWritten }) {
  const [note, setNote] = useState(row.note);
  const [tags, setTags] = useState(row.tags.join(" "));
  const { busy, error, send } = useChange(() => {
    onWritten();
    onClose();
  });
  const save = () => send("/api/runs/notes", { run: row.id, note, tags: tags.split(/[\s,]+/).filter(Boolean) });
  return html`<${Dialog} title="Note of ${row.name}" onClose=${onClose}>
    <${Problem} error=${error} />
    <label>Tags, separated by spaces<input value=${tags} spellcheck=${false} autocomplete="off" onInput=${(event) => setTags(event.target.value)} /></label>
    <label>Note<textarea value=${note} onInput=${(event) => setNote(event.target.value)}></textarea></label>
    <p class="dim">They are kept in notes.json in the run's folder.</p>
    <div class="bar"><button onClick=${save} disabled=${busy}>Save</button><button onClick=${onClose}>Cancel</button></div>
  <//>`;
}

/** The buttons for the chosen runs. @param {{rows: any[], chosen: string[], onChosen: (ids: string[]) => void, onWritten: () => void}} props */
export function WriteBar({ rows, chosen, onChosen, onWritten }) {
  const [open, setOpen] = useState("");
  const known = rows.filter((row) => chosen.includes(row.id));
  if (!known.length) return null;
  const close = () => setOpen("");
  const done = () => {
    onChosen([]);
    onWritten();
  };
  const [listed, archived] = [known.filter((row) => !row.archived), known.filter((row) => row.archived)];
  return html`<div class="bar">
    ${listed.length > 0 && html`<button onClick=${() => setOpen("archive")}>Archive…</button>`}
    ${archived.length > 0 && html`<button onClick=${() => setOpen("restore")}>Take from the archive…</button>`}
    <button class="danger" onClick=${() => setOpen("delete")}>Delete…</button>
    ${open === "archive" && html`<${Archive} rows=${listed} archived=${true} onClose=${close} onDone=${done} />`}
    ${open === "restore" && html`<${Archive} rows=${archived} archived=${false} onClose=${close} onDone=${done} />`}
    ${open === "delete" && html`<${Delete} rows=${known} onClose=${close} onDone=${done} />`}</div>`;
}

function Archive({ rows, archived, onClose, onDone }) {
  const { busy, error, send } = useChange(() => {
    onDone();
    onClose();
  });
  const title = archived ? `Archive ${plural(rows.length, "run")}?` : `Take ${plural(rows.length, "run")} from the archive?`;
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <${Problem} error=${error} />
    <ul>${rows.map((row) => html`<li key=${row.id}>${row.name}</li>`)}</ul>
    <p class="dim">${archived ? "Archived runs are left out of lists; none of their files is moved or changed." : "The runs are listed again."}</p>
    <div class="bar"><button onClick=${() => send("/api/runs/archive", { runs: rows.map((row) => row.id), archived })} disabled=${busy}>${archived ? "Archive" : "List again"}</button>
      <button onClick=${onClose}>Cancel</button></div>
  <//>`;
}

/** Asks for a plan first: what would be deleted, and what stays and why. */
function Delete({ rows, onClose, onDone }) {
  const [plan, setPlan] = useState(null);
  const asked = useChange(setPlan);
  const { busy, error, send } = useChange(() => {
    onDone();
    onClose();
  });
  useLayoutEffect(() => void asked.send("/api/runs/plan", { runs: rows.map((row) => row.id) }), []);
  const remove = async () => {
    const answer = await send("/api/runs/delete", { plan: plan.plan });
    if (answer?.problems.length) {
      setPlan({ ...plan, delete: [] }); // a plan is used once
      onDone();
    }
  };
  return html`<${Dialog} title="Delete ${plural(rows.length, "run")}?" onClose=${onClose}>
    <${Problem} error=${error ?? asked.error} />
    ${!plan && !asked.error && html`<p role="status">Their files are counted…</p>`}
    ${plan?.delete.length > 0 && html`<p>These folders are deleted, with their checkpoints. This cannot be undone.</p>
      <ul>${plan.delete.map((one) => html`<li key=${one.id}><b>${one.name}</b> <span class="dim">${one.path}, ${bytes(one.bytes)}</span></li>`)}</ul>`}
    ${plan?.stay.length > 0 && html`<p>These stay:</p><ul>${plan.stay.map((one) => html`<li key=${one.id}><b>${one.name}</b> ${one.why}</li>`)}</ul>`}
    <div class="bar">${plan?.delete.length > 0 && html`<button class="danger" onClick=${remove} disabled=${busy}>Delete ${count(plan.delete.length)} for ever, ${bytes(plan.bytes)}</button>`}
      <button onClick=${onClose}>${plan && !plan.delete.length ? "Close" : "Cancel"}</button></div>
  <//>`;
}
