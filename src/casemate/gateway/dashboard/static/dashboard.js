// Keeps a page up to date: fetches it again, and puts the parts in place that have changed. Without this script
// everything works, too; one loads the page again by hand.
"use strict";

const EVERY_MS = 2500;
const SLOW_MS = 15000;
let version = document.body.dataset.version;
let failures = 0;

function say(state, text) {
  const pulse = document.getElementById("pulse");
  if (!pulse) return;
  pulse.dataset.state = state;
  if (pulse.textContent !== text) pulse.textContent = text;
}

// Somebody who is typing, or has opened something, is not disturbed.
function busy(part) {
  const active = document.activeElement;
  if (active && part.contains(active) && active.matches("input, select, textarea")) return true;
  return part.querySelector("details[open]") !== null;
}

function put(old, fresh) {
  const known = new Set([...old.querySelectorAll("[id]")].map((e) => e.id));
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const path = focused && (focused.id ? "#" + CSS.escape(focused.id) : focused.getAttribute("href"));
  const scrolled = [...old.querySelectorAll(".scroll")].map((e) => e.scrollLeft);
  const next = document.importNode(fresh, true);
  for (const row of next.querySelectorAll("tr[id], article[id]")) {
    if (!known.has(row.id)) row.classList.add("fresh");
  }
  old.replaceWith(next);
  next.querySelectorAll(".scroll").forEach((e, i) => { e.scrollLeft = scrolled[i] || 0; });
  if (path) {
    const again = path[0] === "#" ? next.querySelector(path)
      : [...next.querySelectorAll("a")].find((a) => a.getAttribute("href") === path);
    if (again) again.focus({ preventScroll: true });
  }
}

async function follow() {
  if (document.hidden) return;
  const answer = await fetch(location.href, {
    headers: { "X-Live": "1", "If-None-Match": version }, cache: "no-store", redirect: "manual",
  });
  if (answer.type === "opaqueredirect") {
    location.reload();
    return;
  }
  if (answer.status !== 304) {
    if (!answer.ok) throw new Error(String(answer.status));
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    let waits = false;
    for (const part of document.querySelectorAll("[data-live][id]")) {
      const fresh = page.getElementById(part.id);
      if (!fresh || fresh.outerHTML === part.dataset.was) continue;
      if (busy(part)) { waits = true; continue; }
      const was = fresh.outerHTML;
      put(part, fresh);
      document.getElementById(part.id).dataset.was = was;
    }
    if (!waits) version = answer.headers.get("ETag") || version;
  }
  failures = 0;
  say("well", "live");
}

async function loop() {
  try {
    await follow();
  } catch (error) {
    failures += 1;
    say("lost", "connection lost");
  }
  setTimeout(loop, failures > 2 ? SLOW_MS : EVERY_MS);
}

for (const part of document.querySelectorAll("[data-live][id]")) part.dataset.was = part.outerHTML;
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
document.querySelectorAll(".matrix").forEach((grid) => { grid.parentElement.scrollLeft = grid.scrollWidth; });
if (version) setTimeout(loop, EVERY_MS);
